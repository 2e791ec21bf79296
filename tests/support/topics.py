"""New topics for tests with official clients."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Any

from support.official_client import ANSWER_S_MAX, OfficialClient

_PREFIXES = {"producer": "p", "transactional": "p", "simple": "c", "push": "c"}
_names = count(1)


class Topics:
    """Topics with clients of the given kinds: producers ``p-<topic>``, consumers ``c-<topic>`` in group ``g-<topic>``.

    The clients of the next topic are started while a test works with this one: it takes a Go client a second.
    """

    def __init__(self, process: OfficialClient, *kinds: str) -> None:
        self._process = process
        self._kinds = kinds
        self._next = self._begin()

    def take(self) -> str:
        """Return a topic nobody used yet; its clients have started."""
        (name, started), self._next = self._next, self._begin()
        for each in started:
            each.result(ANSWER_S_MAX)
        return name

    def _begin(self) -> tuple[str, list[Future[Any]]]:
        name = f"t{next(_names)}-{self._process.language.name}"
        return name, [
            self._process.begin_start(f"{_PREFIXES[kind]}-{name}", kind, name, group=f"g-{name}")
            for kind in self._kinds
        ]
