"""Reads by offset, without leases: pulls, members of pulling groups, waiting at the end of a queue.

Imports: groups, topics and below. Interface: pulls, members, tail waiters.
"""
