"""Admission of calls by their headers, before any byte of the request is stored, decompressed or parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmq.http2.codec.headers import RequestHeaders


@dataclass(slots=True, kw_only=True, eq=False)
class Admission:
    """The decision about a call, made from its headers. One value may serve many calls.

    The handler of a call with a ``refusal`` answers with that refusal, and the request's bytes are dropped. The call's
    bytes count for ``key`` as well as for ``address``. ``credential`` is a value for the use of the admitting code.
    With ``is_operator`` its bytes may use the reserve. ``request_max`` bounds each of its messages (0: the server's
    bound).
    """

    address: str
    key: str = ""
    refusal: Exception | None = None
    credential: Any = None
    is_operator: bool = False
    request_max: int = 0


Admit = Callable[[str, RequestHeaders, str], Admission]  # the path, the headers, the address (``bounds.address_of``)


def admit_all(_path: str, _headers: RequestHeaders, address: str) -> Admission:
    """Admit every call, without a key."""
    return Admission(address=address)
