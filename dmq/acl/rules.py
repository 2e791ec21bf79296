"""Permissions of an access key: only those that one of its rules grants.

Rules are additive: none revokes a permission of another. A ``*`` in a pattern matches any characters, also none. A name
that begins with ``%`` (``%RETRY%group``, ``%DLQ%group``) matches only a pattern that begins with ``%``. So access to
all topics does not include other groups' dead letters unless a rule grants it explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from broker_adapter.contracts.limits import DERIVED_NAME_CHARS_MAX, GROUP_CHARS_MAX, TOPIC_CHARS_MAX

TOPIC: Final = "topic"
GROUP: Final = "group"
PUB: Final = "PUB"  # send to a topic, end transactions, recall
SUB: Final = "SUB"  # consume a topic; consume as a group
ADMIN: Final = "ADMIN"  # manage a group: its policy, retries, dead letters; for an operator also a topic
OPERATE: Final = "OPERATE"  # further permissions of an operator's ADMIN; not written in files

ACTIONS: Mapping[str, frozenset[str]] = {TOPIC: frozenset({PUB, SUB, ADMIN}), GROUP: frozenset({SUB, ADMIN})}

# Roles. Each includes the permissions of the ones before it. The key's rules apply in addition.
VIEWER: Final = "viewer"  # view everything except message bodies
OPERATOR: Final = "operator"  # and change the topics and groups for which its rules grant ADMIN
ADMINISTRATOR: Final = "admin"  # everything
ROLES: Final = (VIEWER, OPERATOR, ADMINISTRATOR)
BODIES: Final = "bodies"  # a viewer, or an operator, with access to message bodies
_ROLE_WORDS: Final = {
    VIEWER: "the role viewer",
    OPERATOR: "the role operator",
    BODIES: "the role viewer with bodies = true",
}
ANY: Final = "*"  # no topic or group has this name
NAME_CHARS_MAX: Final = max(DERIVED_NAME_CHARS_MAX, GROUP_CHARS_MAX, TOPIC_CHARS_MAX)


class Need(NamedTuple):
    """The requirement of a call: one of ``actions``, separated by ``|``, on a topic or group, or a role, or an admin
    key.

    Without a kind no rule is sufficient.
    """

    actions: str
    kind: str = ""
    name: str = ""
    role: str = ADMINISTRATOR  # keys with VIEWER or BODIES need no rule

    def __str__(self) -> str:
        role = _ROLE_WORDS.get(self.role, "")
        if not self.kind:
            return role or "an admin key"
        what = " or ".join(ADMIN if action == OPERATE else action for action in self.actions.split("|"))
        where = f"any {self.kind}" if self.name == ANY else f"{self.kind} {self.name[:NAME_CHARS_MAX]!r}"
        as_operator = " with the role operator" if OPERATE in self.actions else ""
        return f"{what} on {where}{as_operator}" + (f", or {role}" if role else "")


ADMIN_KEY: Final = Need(ADMIN)


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A grant of ``actions`` on every topic, or group, that ``pattern`` matches."""

    kind: str
    pattern: str
    actions: frozenset[str]

    def allows(self, need: Need) -> bool:
        """Return True if this rule is sufficient for ``need``."""
        return (
            need.kind == self.kind
            and not self.actions.isdisjoint(need.actions.split("|"))
            and matches(self.pattern, need.name)
        )

    @property
    def written(self) -> list[str]:
        """The actions as written in the file."""
        return sorted(self.actions - {OPERATE})

    def __str__(self) -> str:
        return f"{self.kind} {self.pattern} = {'|'.join(self.written)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccessKey:
    """A key and its permissions; an admin key has all. Its ``repr`` excludes the secret."""

    name: str
    secret: bytes = field(repr=False)
    is_admin: bool = False
    rules: tuple[AccessRule, ...] = ()
    role: str = ""  # empty: none
    with_bodies: bool = False

    def has(self, role: str) -> bool:
        """Return True if the key has ``role``, and needs no rule for calls that require it."""
        if self.is_admin or role == ADMINISTRATOR:
            return self.is_admin
        if role == OPERATOR:
            return self.role == OPERATOR
        return self.role in {VIEWER, OPERATOR} and (role == VIEWER or self.with_bodies)

    def rule_for(self, need: Need) -> AccessRule | None:
        """Return the first rule that allows ``need``, or None."""
        return next((rule for rule in self.rules if rule.allows(need)), None)

    def lacks(self, *needs: Need) -> Need | None:
        """Return the first of ``needs`` that no rule can satisfy for any name, or None."""
        if self.is_admin:
            return None
        for need in needs:
            if self.has(need.role):
                continue
            wanted = need.actions.split("|")
            if not any(rule.kind == need.kind and not rule.actions.isdisjoint(wanted) for rule in self.rules):
                return need
        return None

    def may(self, need: Need) -> bool:
        """Return True if the key is sufficient for ``need``."""
        return self.has(need.role) or self.rule_for(need) is not None


def matches(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` matches the whole of ``name``, in time proportional to their lengths."""
    if len(name) > NAME_CHARS_MAX or (name.startswith("%") and not pattern.startswith("%")):
        return False
    first, *middle = pattern.split("*")
    if not middle:
        return name == first
    last = middle.pop()
    at, end = len(first), len(name) - len(last)
    if end < at or not name.startswith(first) or not name.endswith(last):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
