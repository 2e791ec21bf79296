"""Who a call is from, decided when its headers are there: before a byte of its request is kept, inflated or parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmq.http2.headers import RequestHeaders


@dataclass(slots=True, kw_only=True, eq=False)
class Admission:
    """What is known of a call from its headers. One value may serve many calls.

    A call with a ``refusal`` gets its handler's answer to that: what it sends is dropped, not kept. ``key`` is who its
    bytes count for beside ``address``; ``credential`` is whatever the one who admits wants to find again.
    ``is_operator`` lets its bytes into the reserve. ``request_max`` bounds a message of it (0: the server's bound).
    """

    address: str
    key: str = ""
    refusal: Exception | None = None
    credential: Any = None
    is_operator: bool = False
    request_max: int = 0


Admit = Callable[[str, RequestHeaders, str], Admission]  # the path, the headers, the address (``bounds.address_of``)


def admit_all(_path: str, _headers: RequestHeaders, address: str) -> Admission:
    """Let everybody in, without a key."""
    return Admission(address=address)
