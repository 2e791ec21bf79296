"""The rows of one group's progress on one queue, as its ops leave them."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.runtime.clock import Moment
from dmq.broker.groups.group_queue import GroupQueue
from dmq.store.schema.keys import Family
from dmq.store.writer.operations import Delete, Op, Put, Tally

_NO_TIME = Moment(0, 0)


def a_queue(end: int = 10) -> GroupQueue:
    """A queue with ``end`` messages, of which nothing is known yet."""
    queue = GroupQueue(7, 8, 9)
    queue.end = end
    return queue


class Rows:
    """The group family as the ops leave it."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def apply(self, ops: Sequence[Op]) -> None:
        """Do what the writer would do."""
        for op in ops:
            if isinstance(op, Tally):
                continue
            assert isinstance(op, Put | Delete)
            assert op.family is Family.GROUP
            if isinstance(op, Put):
                self.rows[op.key] = op.value
            else:
                self.rows.pop(op.key, None)

    def load(self, end: int, now: Moment = _NO_TIME) -> GroupQueue:
        """The queue in the next run, which begins at ``now``."""
        queue = a_queue(end)
        queue.load(sorted(self.rows.items()), now)
        return queue
