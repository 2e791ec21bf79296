"""Producer hook: keeps a failed send in a ``DelaySink`` and repeats it until it succeeds or is dead.

``producers``     one line around a producer (``durable``), and the codecs of its arguments
``redelivery``    the facade: ``Redelivery``, with ``send`` and ``close``; ``environment`` configures it
``health``        the health of a hook, from its ``metrics``
``draining``      threads that repeat kept messages, and the close that stops them
``sending``       one send: attempt, keep, or reject; the handlers that attempt it
``destinations``  whether an attempt may begin now
``verdicts``      the meaning of the errors of handlers
``runtime``       threads, event loops, forks and signals, the log

Imports: ``retry.outcome``, ``retry.policy``, ``retry.sink`` and ``broker_adapter``; no client library, RocksDB or gRPC.
Each part above imports only parts below it. Interface: ``retry`` exports the names of applications; the names below are
for integrations of the hook, and for a broker's own breakers. They are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from retry.hook.destinations import Breaker, Ramp
    from retry.hook.redelivery import TIMEOUT_S_MAX, Payload
    from retry.hook.runtime import guard
    from retry.hook.sending import MODES, WORKERS_MAX, HandlerFunction, is_async

__all__ = [
    "MODES",
    "TIMEOUT_S_MAX",
    "WORKERS_MAX",
    "Breaker",
    "HandlerFunction",
    "Payload",
    "Ramp",
    "guard",
    "is_async",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "retry.hook.destinations": "Breaker Ramp",
        "retry.hook.redelivery": "TIMEOUT_S_MAX Payload",
        "retry.hook.runtime": "guard",
        "retry.hook.sending": "MODES WORKERS_MAX HandlerFunction is_async",
    },
)
