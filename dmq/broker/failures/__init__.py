"""Failed deliveries: the next attempt, or the dead-letter topic.

Imports: groups, topics and below. Interface: failure decisions and waiting retries.
"""
