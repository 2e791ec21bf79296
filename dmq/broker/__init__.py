"""Embedded broker: a full message broker on the store, inside the daemon's process and without a JVM.

Imports: ``dmq.store``, ``dmq.trail``, ``retry`` and below. Interface: the broker and its in-process client, and
the exports of each package in here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.broker.broker import EmbeddedBroker
    from dmq.broker.in_process_client import EmbeddedClassic

__all__ = ["EmbeddedBroker", "EmbeddedClassic"]

_MODULES = {"EmbeddedBroker": "broker", "EmbeddedClassic": "in_process_client"}


def __getattr__(name: str) -> object:
    """Import an export at its first use: a package in here does not load the whole broker."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
