"""What a servicer knows about the call it serves, whatever the transport."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dmq.http2 import Account, Admission, RequestHeaders

CLIENT_ID_HEADER = "x-mq-client-id"
LANGUAGE_HEADER = "x-mq-language"
CLIENT_VERSION_HEADER = "x-mq-client-version"


@dataclass(slots=True, kw_only=True)
class Call:
    """One RPC from one client; ``client_id`` is empty when the client sent none.

    Calls with a stream of answers may wait, and know more: ``deadline_s`` is what was left of the deadline when they
    came in (``None`` without one), ``peer`` the client's address, ``account`` where answers count that the client has
    not taken. ``admission`` is what was decided about the call by its headers. Headers are looked up when asked for:
    most calls need none but the client id.
    """

    client_id: str
    headers: Iterable[tuple[str, str | bytes]] = ()
    deadline_s: float | None = None
    peer: str = ""
    admission: Admission | None = None
    account: Account | None = None

    def header(self, name: str) -> str:
        """Return the first header of that (lower-case) name, or the empty string; binary ones are not read."""
        if isinstance(self.headers, RequestHeaders):  # it decodes no more than it is asked for
            return self.headers.get(name) or ""
        for key, value in self.headers:
            if key == name and isinstance(value, str):
                return value
        return ""

    @property
    def address(self) -> str:
        """Return the address that the call came from; empty if the transport does not say."""
        return self.admission.address if self.admission is not None else ""

    @property
    def packed_bytes(self) -> int:
        """The size in which a request came that was compressed; 0 if it was not, or nobody knows."""
        return self.headers.packed_bytes if isinstance(self.headers, RequestHeaders) else 0

    @property
    def language(self) -> str:
        """``JAVA``, ``GO``, ``PYTHON``, ``RUST``, ``CPP``, ``DOTNET``; Node says ``HTTP``. Whatever the client sent."""
        return self.header(LANGUAGE_HEADER)

    @property
    def version(self) -> str:
        """The version of its library, as the client says it; empty if it does not."""
        return self.header(CLIENT_VERSION_HEADER)
