"""The hook of processes that fork: declared once, where modules are imported, and opened by each process for itself.

    hook = WorkerHook()                          # opens nothing yet, so a server may import this before it forks

    @hook.handler("order-created")
    def send_order(payload: bytes) -> None: ...

    hook.send("order-created", payload)          # the first use in a process opens the hook of this process

A hook that was opened before a fork keeps nothing in the child; here the child opens one of its own.
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
from retry.hook.closing import Closed
from retry.hook.handlers import HandlerExists, HandlerFunction
from retry.hook.process import guard
from retry.hook.redelivery import Payload, Redelivery
from retry.outcome import Outcome

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
JSON: Final = "application/json"

_log = LibraryLog("dmq.integrations")
_Function = TypeVar("_Function", bound=HandlerFunction)


class WorkerHook:
    """Makes a ``Redelivery`` for each process that uses it, with the handlers that were declared here. Thread-safe.

    ``open_hook`` is called once in a process, at the first use; by default the environment says what is opened. What it
    raises the first use raises, and the next one tries again. The process that is forked off begins without a hook; the
    one it was forked from goes on with its own. Each hook is closed at the end of its process, at the latest.
    """

    def __init__(self, open_hook: Callable[[], Redelivery] = Redelivery.from_env) -> None:
        self._open_hook = open_hook
        self._handlers: dict[str, tuple[HandlerFunction, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._opened: Redelivery | None = None
        self._figures: SharedFigures | None = None
        self._is_begun = False
        self._of_parents: list[Redelivery] = []  # an end of them here would be one in the files of the parent
        guard(self)

    def handler(self, type_name: str, **options: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401 - those below
        """Declare the function below as what sends ``type_name``; it stays callable as it is."""

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
        """The hook of this process; it is opened if it is not yet."""
        return self._opened or self._open()

    def start(self) -> None:
        """Open the hook of this process, unless it is open: what waits from earlier runs is sent from now on."""
        _ = self.redelivery

    def begin(self, **_: object) -> None:
        """As ``start``, for what comes before each request: done once in a process, and what it raises is logged.

        An application is not to fail for a hook that it may not need; a send and ``readiness`` try again and say why.
        """
        if self._is_begun:
            return
        self._is_begun = True
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - any of them is for whoever sends
            _log.error("hook_not_started", error=f"{type(error).__name__}: {error}")

    def send(self, type_name: str, payload: Payload, *, key: str | None = None, uid: bytes | None = None) -> Outcome:
        """As ``Redelivery.send``."""
        return self.redelivery.send(type_name, payload, key=key, uid=uid)

    async def send_async(
        self, type_name: str, payload: Payload, *, key: str | None = None, uid: bytes | None = None
    ) -> Outcome:
        """As ``Redelivery.send_async``. Opening the hook takes some milliseconds of the event loop, once."""
        return await self.redelivery.send_async(type_name, payload, key=key, uid=uid)

    def close(self, timeout_s: float | None = None) -> Closed | None:
        """Close the hook of this process; ``None``: it has none. It is opened again if it is used again."""
        with self._lock:
            closing, self._opened = self._opened, None
            figures, self._figures = self._figures, None
            self._is_begun = False
        if figures is not None:
            figures.close()
        return None if closing is None else closing.close(timeout_s)

    async def close_async(self, timeout_s: float | None = None) -> Closed | None:
        """As ``close``, beside an event loop that goes on."""
        return await asyncio.to_thread(self.close, timeout_s)

    def after_fork(self) -> None:
        """A child begins without a hook; a thread that it does not have may hold the lock."""
        self._lock = threading.Lock()
        if self._opened is not None:
            self._of_parents.append(self._opened)
        self._opened = self._figures = None
        self._is_begun = False

    @property
    def close_timeout_s(self) -> float:
        """How long ``close`` takes at most if it is not told; 0 without a hook."""
        opened = self._opened
        return opened.close_timeout_s if opened is not None else 0.0

    def begin_nothing(self) -> None:
        """Let no send and no repetition begin: the process ends."""
        opened = self._opened
        if opened is not None:
            opened.begin_nothing()

    def close_at_exit(self, timeout_s: float) -> None:
        """Close when the process ends."""
        self.close(timeout_s)

    def render_prometheus(self) -> str:
        """Return the figures of this process's hook in Prometheus's text format.

        With ``DMQ_HOOK_METRICS_DIR`` those of all processes that share that folder, with ``pid`` as a label: a scrape
        of a server with several workers reaches any one of them.
        """
        hook, figures = self.redelivery, self._figures
        return hook.render_prometheus() if figures is None else figures.render()

    def readiness(self) -> tuple[bool, str]:
        """Say whether a message that is given to the hook now would be kept, and more about it as JSON.

        A broker that is away makes a process no less ready: that is what the hook is for. The JSON says so all the
        same: ``{"ready": true, "status": "degraded", "reasons": ["destination orders is away"]}``.
        """
        try:
            hook = self.redelivery
            is_ready = hook.metrics().waiting is not None
            health = hook.health()
        except Exception as error:  # noqa: BLE001 - whatever it is: not ready, and here is why
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
    except OSError as error:  # no reason to keep no messages
        _log.error("figures_not_shared", variable=METRICS_DIR, folder=folder, error=str(error))
        return None
