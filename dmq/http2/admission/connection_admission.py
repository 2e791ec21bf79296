"""Connection limits: the total, the share of each address, and the choice of a connection to close for a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final, Generic, Protocol, TypeVar

from dmq.http2.admission.limits import Limits

_LOOKED_AT: Final = 512  # clients per search: a search of thousands would block the loop
_VICTIMS_KEPT: Final = 64  # one search serves this many new connections
_LOOK_AGAIN_S: Final = 0.25  # after a search without a result


class ConnectionUse(IntEnum):
    """Current use of a connection, in the order of eviction: the smallest is closed first."""

    SILENT = 0  # no preface and SETTINGS yet
    IDLE = 1  # no stream
    UNFINISHED = 2  # only incomplete requests
    BUSY = 3
    LEAVING = 4


class AdmissionPlace(IntEnum):
    """The decision about a new connection."""

    NOWHERE = 0
    INSIDE = 1
    RESERVE = 2  # only for calls of operators and health checks


class AdmittedConnection(Protocol):
    """A connection as seen by the limits. ``is_operators``: an operator or a health check has called on it."""

    address: str
    is_local: bool
    is_operators: bool

    def use(self) -> tuple[ConnectionUse, float]:
        """Return the current use, and the monotonic time of its start."""
        ...


G = TypeVar("G", bound=AdmittedConnection)


class ConnectionAdmission(Generic[G]):
    """Counter of connections and admission of new ones. ``guests`` returns all open connections."""

    def __init__(self, limits: Limits, guests: Callable[[], Iterable[G]]) -> None:
        self._limits = limits
        self._guests = guests
        self._by_address: dict[str, int] = {}
        self._count = 0
        share = limits.connections_per_address
        self._share = max(1, limits.connections // 4) if share is None else share
        self._reserved = min(limits.connections_reserved, limits.connections // 4)
        self._reserve: dict[G, None] = {}  # oldest first
        self._victims: list[G] = []  # the next victim last
        self._at = 0  # start of the next search
        self._looked_s: dict[str, float] = {}  # no search before this time, by address of the new connection

    def admit(self, guest: G, now_s: float) -> tuple[AdmissionPlace, G | None]:
        """Return the decision about a new connection and the connection to close for it; count it if admitted.

        The reserve is for connections from this host. One that has made no operator call is closed for the next one.
        """
        place, victim = AdmissionPlace.INSIDE, None
        if self._count - len(self._reserve) >= self._limits.connections - self._reserved:
            victim = self._victim(guest.address, now_s)
            if victim is None:
                place, victim = self._in_reserve(guest)
        if place is not AdmissionPlace.NOWHERE:
            self._count += 1
            self._by_address[guest.address] = self._by_address.get(guest.address, 0) + 1
        return place, victim

    def _in_reserve(self, guest: G) -> tuple[AdmissionPlace, G | None]:
        if not guest.is_local or not self._reserved:
            return AdmissionPlace.NOWHERE, None
        victim = None
        if len(self._reserve) >= self._reserved:
            victim = next((each for each in self._reserve if not each.is_operators), None)
            if victim is None:
                return AdmissionPlace.NOWHERE, None
            del self._reserve[victim]
        self._reserve[guest] = None
        return AdmissionPlace.RESERVE, victim

    def left(self, guest: G) -> None:
        """Count one connection less."""
        self._reserve.pop(guest, None)
        address = guest.address
        self._count -= 1
        count = self._by_address[address] - 1
        if count:
            self._by_address[address] = count
        else:
            del self._by_address[address]

    def _victim(self, address: str, now_s: float) -> G | None:
        is_over = self._by_address.get(address, 0) >= self._share
        for is_fresh in (False, True):
            if is_fresh:
                if now_s < self._looked_s.get(address, 0.0):
                    return None
                self._look(address, is_over=is_over)
            for at in range(len(self._victims) - 1, -1, -1):
                guest = self._victims[at]
                if self._may_go(guest, address, is_over=is_over):
                    del self._victims[at]
                    return guest
        self._looked_s = {key: at_s for key, at_s in self._looked_s.items() if at_s > now_s}
        self._looked_s[address] = now_s + _LOOK_AGAIN_S
        return None

    def _may_go(self, guest: G, address: str, *, is_over: bool) -> bool:
        """Return True if ``guest`` may be closed for a connection of ``address``.

        An address that has its share evicts only its own connections. Others may also evict busy remote connections of
        an address above its share.
        """
        if guest.address not in self._by_address or guest in self._reserve:
            return False
        use, _ = guest.use()
        if is_over:
            return guest.address == address and use < ConnectionUse.BUSY
        if use is ConnectionUse.BUSY:
            return self._by_address[guest.address] > self._share and not guest.is_local
        return use < ConnectionUse.BUSY

    def _look(self, address: str, *, is_over: bool) -> None:
        """Search batches of connections for victims until one is found for ``address``.

        Connections of addresses above their share are evicted before all others, wherever they are in the list.
        """
        guests = list(self._guests())
        crowds = {each: count > self._share for each, count in self._by_address.items()}
        for is_crowd in (True, False):
            for _ in range(0, len(guests), _LOOKED_AT):
                if self._at >= len(guests):
                    self._at = 0
                some = guests[self._at : self._at + _LOOKED_AT]
                self._at += _LOOKED_AT
                self._victims = _ranked([guest for guest in some if crowds.get(guest.address, False) is is_crowd])
                if any(self._may_go(guest, address, is_over=is_over) for guest in self._victims):
                    return


def _ranked(guests: list[G]) -> list[G]:
    uses = [(*guest.use(), id(guest), guest) for guest in guests]
    return [each[-1] for each in sorted(uses, reverse=True)[-_VICTIMS_KEPT:]]
