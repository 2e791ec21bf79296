"""Rows of operators: activities, limits, and commands that resume after a restart.

Imports: keys; ``retry``. Interface: the modules, each a namespace of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.store.schema.operators import activity, limits, message_jobs, orders  # noqa: TC004 - namespaces

__all__ = ["activity", "limits", "message_jobs", "orders"]
