"""Reachability of the brokers and name servers of a cluster, from the results of calls. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

FORGOTTEN_AFTER_LOOKS = 3_600  # an hour of probes: the broker is gone, or a route lists it again


class Reach:
    """Failure state of addresses. Belongs to one event loop. ``told`` is called for each change."""

    def __init__(self, told: Callable[..., None]) -> None:
        self._told = told
        self._errors: dict[str, str] = {}
        self._looks: dict[str, int] = {}
        self._misplaced: set[str] = set()  # responsive, but not of the configured kind

    @property
    def errors(self) -> Mapping[str, str]:
        """Failure reasons of unreachable addresses."""
        return self._errors

    def answered(self, address: str, why: str) -> None:
        """Record the result of a call: the reason ``why`` there was no answer, or an empty string for an answer."""
        if not why and address in self._misplaced:
            return
        was_well = address not in self._errors
        if why:
            self._errors[address] = why
            if was_well:
                self._told("broker_unreachable", address=address, why=why)
        elif not was_well:
            self.forget(address)
            self._told("broker_reachable", address=address)

    def judged(self, address: str, why: str) -> None:
        """Record the reason ``why`` a responsive address is unusable, or an empty string if it is usable."""
        if why:
            self._misplaced.add(address)
        else:
            self._misplaced.discard(address)
        self.answered(address, why)

    def is_away(self, brokers: Collection[str], names: Collection[str]) -> bool:
        """Return True if no broker answers or, before a broker is known, no name server."""
        return all(each in self._errors for each in brokers or names)

    def looked(self, address: str) -> bool:
        """Count a probe of a silent address. Return True after 3,600 probes: the address can then be forgotten."""
        self._looks[address] = self._looks.get(address, 0) + 1
        return self._looks[address] >= FORGOTTEN_AFTER_LOOKS

    def forget(self, address: str) -> None:
        """Remove the state of an address."""
        self._errors.pop(address, None)
        self._looks.pop(address, None)
