"""Rates and quotas of topics and groups.

Imports: ``dmq.broker.topics`` and below. Interface: token buckets, ramps, topic quotas, group rates.
"""

from __future__ import annotations

from dmq.broker.limits.flow import Flow, full, ramp, refilled, taken, wait_s
from dmq.broker.limits.group_rate import GroupFlows
from dmq.broker.limits.topic_quotas import SendQuotas

__all__ = ["Flow", "GroupFlows", "SendQuotas", "full", "ramp", "refilled", "taken", "wait_s"]
