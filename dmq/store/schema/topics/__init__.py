"""Rows of topics and consumer groups: names, settings, progress, positions of notifications.

Imports: keys; ``retry`` and the contracts of ``broker_adapter``. Interface: the modules, each a namespace of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.store.schema.topics import group, names, notified  # noqa: TC004 - namespaces

__all__ = ["group", "names", "notified"]
