"""Retry policies, the ``%RETRY%`` and ``%DLQ%`` decisions, redrive, and the producer hook.

    from retry import Redelivery, durable

Public names are loaded on first use, so ``import retry`` imports none of their modules.

PyPI has an unrelated package that is also named ``retry``. The package installed last overwrites the other. This
package therefore provides the complete API of the PyPI package (``retry.api``), and its users keep working. In the
opposite case ``import dmq`` raises an error: ``DISTRIBUTION`` identifies this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from retry import api as api
    from retry.api import retry
    from retry.hook.destinations import BreakerState
    from retry.hook.draining import Closed
    from retry.hook.environment import EnvironmentInvalid
    from retry.hook.health import Health, HealthStatus, HookHealth
    from retry.hook.metrics import HookMetrics
    from retry.hook.producers import Arguments, Codec, Encoded, PlainCodec, durable
    from retry.hook.redelivery import SPOOL_POLICY, Redelivery
    from retry.hook.sending import Attempt, HandlerExists, UnknownType
    from retry.hook.verdicts import Permanent, Retry, Throttled, Unknown, Unreadable, Verdict, classify
    from retry.outcome import Delivered, Outcome, Rejected, SendRejected, Spooled
    from retry.policy import SPOOL_STEPS_MS, Exponential, Fixed, PolicyError, RetryPolicy, Table
    from retry.sink import DeadEntry, Death, DelaySink, Entry, SinkClosed, SinkError, SinkFull, SinkUnavailable

DISTRIBUTION = "rock-dmq"

__all__ = [
    "DISTRIBUTION",
    "SPOOL_POLICY",
    "SPOOL_STEPS_MS",
    "Arguments",
    "Attempt",
    "BreakerState",
    "Closed",
    "Codec",
    "DeadEntry",
    "Death",
    "DelaySink",
    "Delivered",
    "Encoded",
    "Entry",
    "EnvironmentInvalid",
    "Exponential",
    "Fixed",
    "HandlerExists",
    "Health",
    "HealthStatus",
    "HookHealth",
    "HookMetrics",
    "Outcome",
    "Permanent",
    "PlainCodec",
    "PolicyError",
    "Redelivery",
    "Rejected",
    "Retry",
    "RetryPolicy",
    "SendRejected",
    "SinkClosed",
    "SinkError",
    "SinkFull",
    "SinkUnavailable",
    "Spooled",
    "Table",
    "Throttled",
    "Unknown",
    "UnknownType",
    "Unreadable",
    "Verdict",
    "classify",
    "durable",
    "retry",
]


_export = lazy_exports(
    __name__,
    {
        "retry.api": "retry",
        "retry.hook.destinations": "BreakerState",
        "retry.hook.draining": "Closed",
        "retry.hook.environment": "EnvironmentInvalid",
        "retry.hook.health": "HookHealth Health HealthStatus",
        "retry.hook.metrics": "HookMetrics",
        "retry.hook.producers": "Arguments Codec Encoded PlainCodec durable",
        "retry.hook.redelivery": "SPOOL_POLICY Redelivery",
        "retry.hook.sending": "Attempt HandlerExists UnknownType",
        "retry.hook.verdicts": "Permanent Retry Throttled Unknown Unreadable Verdict classify",
        "retry.outcome": "Delivered Outcome Rejected SendRejected Spooled",
        "retry.policy": "SPOOL_STEPS_MS Exponential Fixed PolicyError RetryPolicy Table",
        "retry.sink": "DeadEntry Death DelaySink Entry SinkClosed SinkError SinkFull SinkUnavailable",
    },
)


def __getattr__(name: str) -> object:
    # the PyPI package exposes its module ``api`` after ``import retry``
    return import_module("retry.api") if name == "api" else _export(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
