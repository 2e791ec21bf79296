"""Recurring messages: the times of a rule, firing in the scheduler's thread, operators' changes.

Imports: sending, topics and below. Interface: schedules, firing, cron times, message properties.
"""
