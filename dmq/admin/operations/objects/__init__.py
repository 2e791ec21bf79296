"""Operations on named objects: topics, consumer groups, schedules, quotas, clients of the public protocol.

Imports: messages, requests, quotas of keys, the broker and below. Interface: a class with a method per RPC for each
subject, and the quotas of topics for the status.
"""

from __future__ import annotations

from dmq.admin.operations.objects.clients import ClientCalls
from dmq.admin.operations.objects.groups import GroupCalls
from dmq.admin.operations.objects.quotas import QuotaCalls
from dmq.admin.operations.objects.schedules import ScheduleCalls
from dmq.admin.operations.objects.topic_quotas import fullest, refusals
from dmq.admin.operations.objects.topics import TopicCalls

__all__ = ["ClientCalls", "GroupCalls", "QuotaCalls", "ScheduleCalls", "TopicCalls", "fullest", "refusals"]
