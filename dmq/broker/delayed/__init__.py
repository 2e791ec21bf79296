"""Changes to pending delayed messages: cancel, reschedule, deliver now, recall.

Imports: handles, io, topics and below. Interface: changes and recall.
"""
