"""Admission of calls by their headers: authentication, and the permissions that the RPC needs on any resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from broker_adapter.contracts.errors import Refused, Rule
from dmq.acl.guard import Authenticator
from dmq.acl.quotas import ADDRESS, KEY, Holder, Quotas
from dmq.acl.rules import AccessKey, Need
from dmq.acl.signature import Header, claim_of, unauthorized
from dmq.http2 import LOOPBACK, Admission, RequestHeaders
from dmq.runtime.guess_limit import CALLS, GuessLimit

_KEPT: Final = 8192
_OWN: Final = frozenset((LOOPBACK, ""))  # web processes count for their own callers; "": the transport has no addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """The header checks of one RPC. Without ``lacks`` it needs no key.

    ``lacks`` returns a permission that a key lacks for every resource; None if a rule may apply.
    """

    rpc: str
    request_max: int = 0
    lacks: Callable[[AccessKey], Need | None] | None = None
    is_operators: bool = False


class RpcPolicy:
    """Admission of calls. With a guard, RPCs with ``lacks`` need a key. The event loop owns it."""

    def __init__(self, entrances: Mapping[str, Entrance], guard: Authenticator | None, quotas: Quotas) -> None:
        """``entrances`` are keyed by path, with one for every served path."""
        self._entrances = dict(entrances)
        self._guard = guard
        self._quotas = quotas
        self._guesses = GuessLimit(CALLS, quotas.clock)
        self._known: dict[tuple[str, str], Admission] = {}  # of calls that need no key

    def admit(self, path: str, headers: RequestHeaders, address: str) -> Admission:
        """Return the admission of a call. An error is its ``refusal`` and is not raised."""
        known = self._known.get((path, address))
        if known is not None:
            return known
        entrance = self._entrances[path]
        if self._guard is not None and entrance.lacks is not None:
            return self.judge(entrance, headers.get, address)
        if len(self._known) >= _KEPT:
            self._known.clear()
        known = self._known[path, address] = _admission(entrance, address)
        return known

    def judge(self, entrance: Entrance, header: Header, address: str) -> Admission:
        """Return the admission of a call that needs a key, from any transport."""
        assert self._guard is not None
        assert entrance.lacks is not None
        guesses = self._guesses
        try:
            if wait_s := guesses.wait_s(address, lambda: claim_of(header).access_key):
                raise unauthorized(f"too many signatures from {address} were refused: not checked for {wait_s:.0f} s")
            key = self._guard.enter(entrance.rpc, header, entrance.lacks)
        except Refused as refused:
            if refused.rule is Rule.UNAUTHORIZED and address not in _OWN and _is_signed(header):
                guesses.admit(address)
            made = _admission(entrance, address)
            made.refusal, made.is_operator = refused, False
            return made
        guesses.right(address, key.name)
        self._quotas.judge(key)
        made = _admission(entrance, address)
        made.key, made.credential = key.name, key
        return made


def _is_signed(header: Header) -> bool:
    """Return True if a call has a signature, right or wrong: an unsigned call is no guess."""
    try:
        claim_of(header)
    except Refused:
        return False
    return True


def holders_of(admission: Admission | None) -> tuple[Holder, ...]:
    """Return the quota holders of a call; empty if its transport does not identify the client."""
    if admission is None:
        return ()
    if not admission.address:
        return (Holder(KEY, admission.key),)
    place = Holder(ADDRESS, admission.address)
    return (Holder(KEY, admission.key), place) if admission.key else (place,)


def _admission(entrance: Entrance, address: str) -> Admission:
    return Admission(
        address=address,
        request_max=entrance.request_max,
        is_operator=entrance.is_operators and address == LOOPBACK,
    )
