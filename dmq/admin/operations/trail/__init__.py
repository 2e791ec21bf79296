"""Operations on the trail and the figures it proves: the activity log, audits, events of a message, the ledger.

Imports: requests, recovery, the trail, the broker and below. Interface: a class with a method per RPC for each subject,
and the callers that the activity log records.
"""

from __future__ import annotations

from dmq.admin.operations.trail.activity import ActivityLog, AdminCaller
from dmq.admin.operations.trail.audits import AuditCalls
from dmq.admin.operations.trail.events import EventCalls
from dmq.admin.operations.trail.ledger import LedgerCalls

__all__ = ["ActivityLog", "AdminCaller", "AuditCalls", "EventCalls", "LedgerCalls"]
