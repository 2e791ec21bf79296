"""Calls that the key of a person allows, for the buttons of a page. The daemon checks each call all the same."""

from __future__ import annotations

from dmq.acl.rules import ADMINISTRATOR
from dmq.admin.client import AdminClient, CallFailed, CallRefused, NotAllowed


class AllowedCalls:
    """Function of templates: whether a page offers a call. It asks the daemon once for each topic and group."""

    def __init__(self, client: AdminClient, *, is_read_only: bool) -> None:
        self._client = client
        self._is_read_only = is_read_only
        self._known: dict[tuple[str, str], frozenset[str] | None] = {}

    def __call__(self, rpc: str, topic: str = "", group: str = "") -> bool:
        """Return True if the key allows the RPC for a topic and a group; for any of them without a name."""
        if self._is_read_only:
            return False
        if (topic, group) not in self._known:
            self._known[topic, group] = self._allowed(topic, group)
        allowed = self._known[topic, group]
        return allowed is None or rpc in allowed

    @property
    def is_admin(self) -> bool:
        """True if the key is an admin key, or if the daemon has no access keys."""
        try:
            found = self._client.access()
        except (CallFailed, CallRefused):
            return False
        return found.role == ADMINISTRATOR or not found.key

    def _allowed(self, topic: str, group: str) -> frozenset[str] | None:
        """Return the names of the RPCs, or None if the daemon is too old to return them."""
        try:
            return frozenset(self._client.access(topic, group).rpcs)
        except NotAllowed:
            return frozenset()
        except CallFailed:
            return None
