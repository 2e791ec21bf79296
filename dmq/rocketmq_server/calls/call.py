"""The context of one call, independent of the transport."""

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

    The last four fields are optional. ``deadline_s`` is the time that was left until the deadline when the call arrived
    (``None`` without a deadline). ``peer`` is the client's address. ``account`` counts the bytes of answers that the
    client has not read yet. ``admission`` is the decision made from the headers. Headers are looked up on demand,
    because most calls need only the client id.
    """

    client_id: str
    headers: Iterable[tuple[str, str | bytes]] = ()
    deadline_s: float | None = None
    peer: str = ""
    admission: Admission | None = None
    account: Account | None = None

    def header(self, name: str) -> str:
        """Return the first text header with that lower-case name, or the empty string. Binary headers are ignored."""
        if isinstance(self.headers, RequestHeaders):  # it decodes requested headers only
            return self.headers.get(name) or ""
        for key, value in self.headers:
            if key == name and isinstance(value, str):
                return value
        return ""

    @property
    def address(self) -> str:
        """Return the client's address; empty if the transport does not provide it."""
        return self.admission.address if self.admission is not None else ""

    @property
    def packed_bytes(self) -> int:
        """The compressed size of the request in bytes; 0 if it was not compressed or the size is unknown."""
        return self.headers.packed_bytes if isinstance(self.headers, RequestHeaders) else 0

    @property
    def language(self) -> str:
        """``JAVA``, ``GO``, ``PYTHON``, ``RUST``, ``CPP`` or ``DOTNET``; Node sends ``HTTP``. The header is not
        validated.
        """
        return self.header(LANGUAGE_HEADER)

    @property
    def version(self) -> str:
        """The version of the client library as the client reports it; empty if it does not."""
        return self.header(CLIENT_VERSION_HEADER)
