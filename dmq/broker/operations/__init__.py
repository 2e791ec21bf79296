"""Operators' work on topics, groups, pending messages and dead letters; retention and lag.

Imports: all other packages of the broker. Interface: administration, removal jobs, dead letters, bulk changes
of pending messages, retention, lag.
"""

from __future__ import annotations

from dmq.broker.operations.admin import BEGIN, END, Operator
from dmq.broker.operations.dead_letters import DeadLetters, Letter
from dmq.broker.operations.index_builds import IndexBuilds
from dmq.broker.operations.lag import Lag, in_flight
from dmq.broker.operations.message_filter import is_due, is_meant
from dmq.broker.operations.message_jobs import MessageJobs, PendingMessage
from dmq.broker.operations.message_states import GroupState, Where
from dmq.broker.operations.removal_jobs import Procedures
from dmq.broker.operations.retention import KEEP_DEFAULT, Retention

__all__ = [
    "BEGIN",
    "END",
    "KEEP_DEFAULT",
    "DeadLetters",
    "GroupState",
    "IndexBuilds",
    "Lag",
    "Letter",
    "MessageJobs",
    "Operator",
    "PendingMessage",
    "Procedures",
    "Retention",
    "Where",
    "in_flight",
    "is_due",
    "is_meant",
]
