"""Rows of messages: values of timeline and queues, the index, own keys, properties, schedules.

Imports: keys; ``retry``. Interface: the modules, each a namespace of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.store.schema.messages import failure_reason, index, own_keys, properties, record, recurring  # noqa: TC004 - namespaces

__all__ = ["failure_reason", "index", "own_keys", "properties", "record", "recurring"]
