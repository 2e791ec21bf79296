"""One queue with messages of message groups, and receives that take from it."""

from __future__ import annotations

from dataclasses import dataclass

from support.forges.messages.group_rows import Rows, a_queue

from broker_adapter.runtime.clock import Moment
from dmq.broker.groups.group_queue import DeliveryLease

NOW_MS = 1_000_000
ALL = 1_000


@dataclass
class Reading:
    """A receive whose messages are being read."""

    first_epoch: int
    run_max: int
    taken: list[int]


class Line:
    """A queue with messages of message groups (one letter each, ``-`` for none), and who receives from it."""

    def __init__(self, message_groups: str = "") -> None:
        self.rows = Rows()
        self.queue = a_queue(0)
        self.message_groups = ""
        self.epoch = 0
        self.send(message_groups)
        self.rows.apply(self.queue.start_at(0))

    def send(self, message_groups: str) -> None:
        """Append messages."""
        self.message_groups += message_groups
        self.queue.end = len(self.message_groups)

    def group_of(self, offset: int) -> str:
        """The message group of a message, empty for none."""
        return self.message_groups[offset].strip("-")

    def begin(self, limit: int = ALL, run_max: int = ALL) -> Reading:
        """Take and lease, as a receive does before it reads."""
        reading = Reading(self.epoch + 1, run_max, [])
        for offset, returned in self.queue.take(limit):
            self.epoch += 1
            self.queue.lease(offset, DeliveryLease(self.epoch, returned.attempt, NOW_MS))
            reading.taken.append(offset)
        assert reading.taken == sorted(set(reading.taken))
        return reading

    def end(self, reading: Reading) -> list[int]:
        """Hand out what may go out, now that it was read."""
        return [offset for offset in reading.taken if self.admit(reading, offset)]

    def admit(self, reading: Reading, offset: int) -> bool:
        """Say whether one message that was read goes out."""
        return self.queue.admit(offset, self.group_of(offset), first_epoch=reading.first_epoch, run_max=reading.run_max)

    def cancel(self, reading: Reading) -> None:
        """Hand out nothing after all."""
        for offset in reversed(reading.taken):
            self.queue.give_back(offset)

    def receive(self, limit: int = ALL, run_max: int = ALL) -> list[int]:
        """A whole receive."""
        return self.end(self.begin(limit, run_max))

    def ack(self, *offsets: int) -> None:
        """Finish messages."""
        for offset in offsets:
            self.rows.apply(self.queue.finish((offset,)))
            self.queue.release(offset)

    def come_back(self, offset: int) -> None:
        """End a lease."""
        lease = self.queue.leases[offset]
        attempt, ops = self.queue.plan_return(offset, lease, NOW_MS)
        self.rows.apply(ops)
        assert self.queue.come_back(offset, lease, attempt)

    def hide(self, offset: int) -> None:
        """Make a lease outlive the run."""
        lease = self.queue.leases[offset]
        self.rows.apply(self.queue.hide(offset, lease, Moment(NOW_MS, NOW_MS), 1, message_group=self.group_of(offset)))

    def restart(self) -> None:
        """Begin the next run."""
        self.queue = self.rows.load(len(self.message_groups))
