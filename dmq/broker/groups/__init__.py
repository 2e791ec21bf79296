"""Consumer groups: progress on each queue, subscriptions, message order, lease timers.

Imports: handles, io, topics and below. Interface: group queues, subscriptions, pull offsets.
"""
