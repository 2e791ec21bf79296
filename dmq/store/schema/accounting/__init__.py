"""Rows that the writer derives from each batch: pending counts, the ledger, the audit outbox.

Imports: keys. Interface: the modules, each a namespace of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.store.schema.accounting import counts, ledger, outbox  # noqa: TC004 - namespaces

__all__ = ["counts", "ledger", "outbox"]
