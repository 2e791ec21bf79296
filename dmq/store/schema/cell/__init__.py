"""Rows and files of the store itself: identity, clock, forwarding state, replication position.

Imports: keys. Interface: the modules, each a namespace of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.store.schema.cell import border, clock, files, identity, position  # noqa: TC004 - namespaces

__all__ = ["border", "clock", "files", "identity", "position"]
