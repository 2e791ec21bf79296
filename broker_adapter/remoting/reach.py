"""Which machines of a cluster answer, as the calls to them tell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

FORGOTTEN_AFTER_LOOKS = 3_600  # an hour of them: by then it is gone for good, or a route names it again


class Reach:
    """Belongs to one event loop. ``told`` hears of each change."""

    def __init__(self, told: Callable[..., None]) -> None:
        self._told = told
        self._errors: dict[str, str] = {}
        self._looks: dict[str, int] = {}
        self._misplaced: set[str] = set()  # they answer, but are not what they were configured as

    @property
    def errors(self) -> Mapping[str, str]:
        """Why there was no answer, by the addresses of those that do not answer."""
        return self._errors

    def answered(self, address: str, why: str) -> None:
        """Note a call: ``why`` there was no answer, empty if there was one."""
        if not why and address in self._misplaced:
            return
        was_well = address not in self._errors
        if why:
            self._errors[address] = why
            if was_well:
                self._told("broker_silent", address=address, why=why)
        elif not was_well:
            self.forget(address)
            self._told("broker_returned", address=address)

    def judged(self, address: str, why: str) -> None:
        """Note ``why`` an address that answers cannot be used, empty if it can."""
        if why:
            self._misplaced.add(address)
        else:
            self._misplaced.discard(address)
        self.answered(address, why)

    def is_away(self, brokers: Collection[str], names: Collection[str]) -> bool:
        """Say whether none of the brokers answers; of a cluster that was never seen, none of its name servers."""
        return all(each in self._errors for each in brokers or names)

    def looked(self, address: str) -> bool:
        """Note that it was asked on purpose; say whether it has not answered for so long that it can be forgotten."""
        self._looks[address] = self._looks.get(address, 0) + 1
        return self._looks[address] >= FORGOTTEN_AFTER_LOOKS

    def forget(self, address: str) -> None:
        """Remove all that is known of an address."""
        self._errors.pop(address, None)
        self._looks.pop(address, None)
