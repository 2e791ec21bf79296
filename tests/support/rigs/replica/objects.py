"""Object store in memory, with faults on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import Enum

from dmq.replication.objects import ReplicaUnavailable


class Fault(Enum):
    """Fault of one request."""

    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"  # the object store did the work


class MemoryObjects:
    """Implementation of ``ObjectStore``. ``fault`` is asked before each request, with its method and name."""

    def __init__(self) -> None:
        self.url = "memory://objects"
        self.rows: dict[str, bytes] = {}
        self.fault: Callable[[str, str], Fault | None] = lambda method, name: None
        self.calls: list[tuple[str, str]] = []
        self.changed = threading.Condition()

    def create(self, name: str, data: bytes) -> bool:
        fault = self._begin("create", name)
        with self.changed:
            is_new = name not in self.rows
            if is_new:
                self.rows[name] = data
                self.changed.notify_all()
        self._end(fault)
        return is_new

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        fault = self._begin("replace", name)
        with self.changed:
            found = self.rows.get(name)
            is_current = etag == (None if found is None else str(hash(found)))
            if is_current:
                self.rows[name] = data
                self.changed.notify_all()
        self._end(fault)
        return str(hash(data)) if is_current else None

    def read(self, name: str) -> tuple[bytes, str] | None:
        self._end(self._begin("read", name))
        found = self.rows.get(name)
        return None if found is None else (found, str(hash(found)))

    def list(self, prefix: str, after: str = "") -> list[str]:
        self._end(self._begin("list", prefix))
        return sorted(each for each in self.rows.copy() if each.startswith(prefix) and each > after)

    def delete(self, names: Iterable[str]) -> None:
        for each in names:
            self.rows.pop(each, None)

    def wait_for(self, is_reached: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until a request has changed the objects, or was made, such that ``is_reached``."""
        with self.changed:
            assert self.changed.wait_for(is_reached, timeout_s)

    def _begin(self, method: str, name: str) -> Fault | None:
        with self.changed:
            self.calls.append((method, name))
            self.changed.notify_all()
        fault = self.fault(method, name)
        if fault is Fault.REQUEST_LOST:
            raise ReplicaUnavailable("the request was lost")
        return fault

    @staticmethod
    def _end(fault: Fault | None) -> None:
        if fault is Fault.ANSWER_LOST:
            raise ReplicaUnavailable("the answer was lost")
