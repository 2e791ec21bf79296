"""Opaque texts for clients: receipt handles, recall handles, transaction ids.

Imports: ``dmq.store`` and below. Interface: encode and decode functions of each handle.
"""

from __future__ import annotations

from dmq.broker.handles.entry_handle import EntryHandle, EntryHandles, HandleKind, NotAHandle, read_handle
from dmq.broker.handles.receipt_handle import ReceiptHandle, ReceiptHandles, name_of, read_receipt

__all__ = [
    "EntryHandle",
    "EntryHandles",
    "HandleKind",
    "NotAHandle",
    "ReceiptHandle",
    "ReceiptHandles",
    "name_of",
    "read_handle",
    "read_receipt",
]
