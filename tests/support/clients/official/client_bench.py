"""One daemon, a process of clients per language in front of it, and new topics: for suites of many small tests."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from support.clients.official.client import ANSWER_S_MAX, GO, JAVA, NODE, PYTHON, Language, OfficialClient, require
from support.effort import CLIENTS, at_length
from support.rigs.daemon.process import Daemon

PREFIXES = {"producer": "p", "transactional": "p", "simple": "c", "listener": "c"}
_names = count(1)

# For what does not depend on the client: properties are the same in every language.
BY_PROPERTY = (PYTHON, NODE, pytest.param(GO, marks=at_length), pytest.param(JAVA, marks=at_length))


class Topics:
    """Topics with clients of the given kinds: producers ``p-<topic>``, consumers ``c-<topic>`` in group ``g-<topic>``.

    A ``listener`` is what reports deliveries in this language.

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
        language = self._process.language
        name = f"t{next(_names)}-{language.name}"
        return name, [
            self._process.begin_start(
                f"{PREFIXES[kind]}-{name}", language.listener if kind == "listener" else kind, name, group=f"g-{name}"
            )
            for kind in self._kinds
        ]


class Bench:
    """One daemon and, on demand, one process per language in front of it; its topics have clients of ``kinds``."""

    def __init__(self, daemon: Daemon, stack: ExitStack, tmp: pytest.TempPathFactory, *kinds: str) -> None:
        self.daemon = daemon
        self._stack = stack
        self._tmp = tmp
        self._kinds = kinds
        self._processes: dict[str, OfficialClient] = {}
        self._topics: dict[str, Topics] = {}

    def new_process(self, language: Language) -> OfficialClient:
        """Return a process of its own; a test may end it."""
        require(language)
        home = self._tmp.mktemp(language.name)
        return self._stack.enter_context(OfficialClient(language, home, self.daemon.address))

    def process(self, language: Language) -> OfficialClient:
        """Return the process of a language, started if it is not there yet."""
        if language.name not in self._processes:
            self._processes[language.name] = self.new_process(language)
        return self._processes[language.name]

    def topic(self, language: Language) -> str:
        """Return a new topic with clients of that language."""
        if language.name not in self._topics:
            self._topics[language.name] = Topics(self.process(language), *self._kinds)
        return self._topics[language.name].take()

    def stop(self) -> None:
        """Have the daemon end in order, beside its clients.

        Those of all versions end before it: each would look for its daemon again and again, and a stop beside so many
        says how busy the machine is.
        """
        if CLIENTS == "all":
            self._stack.close()
        self.daemon.stop()
