"""Recurring messages: occurrence times of a rule, firing in the scheduler's thread, changes by operators.

Imports: sending, topics and below. Interface: schedules, firing, cron times, message properties.
"""
