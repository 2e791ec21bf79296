"""Hook of processes that fork: declared once at import, and opened in each process separately.

    hook = WorkerHook()                          # opens nothing yet, so a server may import this before it forks

    @hook.handler("order-created")
    def send_order(payload: bytes) -> None: ...

    hook.send("order-created", payload)          # the first use in a process opens the hook of this process

A hook that was opened before a fork stores nothing in the child; with this class the child opens its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from broker_adapter.runtime.log import LibraryLog
from dmq.integrations.environment import METRICS_DIR
from dmq.integrations.figures import SharedFigures
from retry import Closed, HandlerExists, Redelivery
from retry.hook import HandlerFunction, Payload, guard
from retry.outcome import Outcome

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
JSON: Final = "application/json"

_log = LibraryLog("dmq.integrations")
_Function = TypeVar("_Function", bound=HandlerFunction)


class WorkerHook:
    """Factory of one ``Redelivery`` for each process that uses it, with the handlers declared here. Thread-safe.

    ``open_hook`` is called once per process, at the first use. By default it opens the hook that the environment
    describes. The first use raises its exception, and the next use tries again. A forked process starts without a hook;
    its parent keeps its own. Each hook is closed at the end of its process at the latest.
    """

    def __init__(self, open_hook: Callable[[], Redelivery] = Redelivery.from_env) -> None:
        self._open_hook = open_hook
        self._handlers: dict[str, tuple[HandlerFunction, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._opened: Redelivery | None = None
        self._figures: SharedFigures | None = None
        self._is_begun = False
        self._of_parents: list[Redelivery] = []  # kept alive: closing them here would change the files of the parent
        guard(self)

    def handler(self, type_name: str, **options: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401 - those below
        """Declare the decorated function as the handler of ``type_name``; it stays callable."""

        def declare(function: _Function) -> _Function:
            self.add_handler(type_name, function, **options)
            return function

        return declare

    def add_handler(self, type_name: str, function: HandlerFunction, **options: Any) -> None:  # noqa: ANN401
        """Declare ``function``, with the ``options`` of ``Redelivery.add_handler``."""
        with self._lock:
            if type_name in self._handlers:
                raise HandlerExists(f"the type {type_name!r} has a handler already")
            if self._opened is not None:
                self._opened.add_handler(type_name, function, **options)
            self._handlers[type_name] = function, options

    @property
    def redelivery(self) -> Redelivery:
        """Hook of this process, opened at the first use."""
        return self._opened or self._open()

    def start(self) -> None:
        """Open the hook of this process, unless it is open: pending messages of earlier runs are sent from now on."""
        _ = self.redelivery

    def begin(self, **_: object) -> None:
        """Like ``start``, for a call before each request: runs once in a process, and logs exceptions.

        An application must not fail because of a hook that it may not need. A send and ``readiness`` try again and
        report the reason.
        """
        if self._is_begun:
            return
        self._is_begun = True
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - the next send raises it
            _log.error("hook_start_failed", error=f"{type(error).__name__}: {error}")

    def send(self, type_name: str, payload: Payload, *, key: str | None = None, uid: bytes | None = None) -> Outcome:
        """See ``Redelivery.send``."""
        return self.redelivery.send(type_name, payload, key=key, uid=uid)

    async def send_async(
        self, type_name: str, payload: Payload, *, key: str | None = None, uid: bytes | None = None
    ) -> Outcome:
        """See ``Redelivery.send_async``. Opening the hook blocks the event loop for some milliseconds, once."""
        return await self.redelivery.send_async(type_name, payload, key=key, uid=uid)

    def close(self, timeout_s: float | None = None) -> Closed | None:
        """Close the hook of this process, and return its result; None if it has none. The next use opens it again."""
        with self._lock:
            closing, self._opened = self._opened, None
            figures, self._figures = self._figures, None
            self._is_begun = False
        if figures is not None:
            figures.close()
        return None if closing is None else closing.close(timeout_s)

    async def close_async(self, timeout_s: float | None = None) -> Closed | None:
        """Like ``close``, without blocking the event loop."""
        return await asyncio.to_thread(self.close, timeout_s)

    def after_fork(self) -> None:
        """Start a child without a hook, and replace the lock, because a thread that the child lacks may hold it."""
        self._lock = threading.Lock()
        if self._opened is not None:
            self._of_parents.append(self._opened)
        self._opened = self._figures = None
        self._is_begun = False

    @property
    def close_timeout_s(self) -> float:
        """Longest duration of ``close`` without a timeout; 0 without a hook."""
        opened = self._opened
        return opened.close_timeout_s if opened is not None else 0.0

    def begin_nothing(self) -> None:
        """Start no further send or retry, because the process ends."""
        opened = self._opened
        if opened is not None:
            opened.begin_nothing()

    def close_at_exit(self, timeout_s: float) -> None:
        """Close when the process ends."""
        self.close(timeout_s)

    def render_prometheus(self) -> str:
        """Return the metrics of this process's hook in Prometheus's text format.

        With ``DMQ_HOOK_METRICS_DIR`` they include all processes that share that folder, with ``pid`` as a label: a
        scrape of a server with several workers reaches any one of them.
        """
        hook, figures = self.redelivery, self._figures
        return hook.render_prometheus() if figures is None else figures.render()

    def readiness(self) -> tuple[bool, str]:
        """Return whether a message sent now would be stored, and details as JSON.

        An unavailable broker does not affect readiness, because the hook exists for this case. The JSON reports it:
        ``{"ready": true, "status": "degraded", "reasons": ["destination orders is away"]}``.
        """
        try:
            hook = self.redelivery
            is_ready = hook.metrics().waiting is not None
            health = hook.health()
        except Exception as error:  # noqa: BLE001 - any error means not ready
            _log.error("hook_not_ready", error=f"{type(error).__name__}: {error}")
            return False, json.dumps({"ready": False, "status": "degraded", "reasons": [type(error).__name__]})
        return is_ready, json.dumps({"ready": is_ready, "status": health.status, "reasons": health.reasons})

    def _open(self) -> Redelivery:
        with self._lock:
            if self._opened is None:
                opened = self._open_hook()
                try:
                    for name, (function, options) in self._handlers.items():
                        opened.add_handler(name, function, **options)
                except BaseException:
                    opened.close()
                    raise
                self._figures = _shared_figures(opened)
                self._opened = opened
            return self._opened


def _shared_figures(hook: Redelivery) -> SharedFigures | None:
    folder = os.environ.get(METRICS_DIR, "")
    try:
        return SharedFigures(Path(folder), hook.render_prometheus) if folder else None
    except OSError as error:  # messages are kept even without metrics
        _log.error("metrics_sharing_failed", variable=METRICS_DIR, folder=folder, error=str(error))
        return None
