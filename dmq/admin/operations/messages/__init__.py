"""Operations on messages: the state of one, pages, searches, changes, bulk changes, dead letters, due times, replays.

Imports: requests, the broker, the cluster and below. Interface: a class with a method per RPC for each subject.
"""

from __future__ import annotations

from dmq.admin.operations.messages.changes import ChangeCalls
from dmq.admin.operations.messages.due import DueCalls
from dmq.admin.operations.messages.letters import LetterCalls
from dmq.admin.operations.messages.message_jobs import MessageJobCalls
from dmq.admin.operations.messages.messages import MessageCalls
from dmq.admin.operations.messages.property_search import PropertyCalls
from dmq.admin.operations.messages.replays import ReplayCalls

__all__ = ["ChangeCalls", "DueCalls", "LetterCalls", "MessageCalls", "MessageJobCalls", "PropertyCalls", "ReplayCalls"]
