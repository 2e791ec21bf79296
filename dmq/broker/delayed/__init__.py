"""Changes to pending delayed messages: cancel, reschedule, deliver now, recall.

Imports: handles, io, topics and below. Interface: changes and recall.
"""

from __future__ import annotations

from dmq.broker.delayed.changes import Changed, ChangeOutcome, DelayedMessages, HeldBy, Meant
from dmq.broker.delayed.recall import Recalls, decode_recall

__all__ = ["ChangeOutcome", "Changed", "DelayedMessages", "HeldBy", "Meant", "Recalls", "decode_recall"]
