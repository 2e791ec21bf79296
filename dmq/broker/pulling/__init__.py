"""Reads by offset, without leases: pulls, members of pulling groups, waiting at the end of a queue.

Imports: groups, topics and below. Interface: pulls, members, tail waiters.
"""

from __future__ import annotations

from dmq.broker.pulling.members import Members
from dmq.broker.pulling.pulls import Pulls
from dmq.broker.pulling.tail_waiters import Tail, Tails

__all__ = ["Members", "Pulls", "Tail", "Tails"]
