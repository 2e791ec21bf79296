"""Collections that must not be gone through: what a call costs that belongs to one of many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn


class UnreadList(list[Any]):
    """A list that fails whoever goes through it."""

    def __iter__(self) -> Iterator[Any]:
        _refuse()


class UnreadDict(dict[Any, Any]):
    """A dict that gives what is asked for by its key, and fails whoever goes through it."""

    def __iter__(self) -> Iterator[Any]:
        _refuse()

    def values(self) -> NoReturn:
        """As going through it."""
        _refuse()

    def items(self) -> NoReturn:
        """As going through it."""
        _refuse()


def _refuse() -> NoReturn:
    raise AssertionError("all of it was gone through")
