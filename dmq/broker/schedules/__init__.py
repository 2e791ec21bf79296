"""Recurring messages: occurrence times of a rule, firing in the scheduler's thread, changes by operators.

Imports: sending, topics and below. Interface: schedules, firing, cron times, message properties.
"""

from __future__ import annotations

from dmq.broker.schedules.cron import RuleError, next_time, read_cron, zone_of
from dmq.broker.schedules.firing import Recurring, largest, sample
from dmq.broker.schedules.schedules import NewSchedule, Schedules, ScheduleStatus, check_name, check_types

__all__ = [
    "NewSchedule",
    "Recurring",
    "RuleError",
    "ScheduleStatus",
    "Schedules",
    "check_name",
    "check_types",
    "largest",
    "next_time",
    "read_cron",
    "sample",
    "zone_of",
]
