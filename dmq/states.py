"""The states of messages: one table, for what is listed, shown and told everywhere."""

from __future__ import annotations

from enum import IntEnum


class MessageState(IntEnum):
    """Where a message is, and what a group did with it; the numbers are those of ``rockdmq.admin.v1``.

    WAITING, QUEUED, RECALLED, REPLACED, ABSORBED, EXPIRED and UNKNOWN are said of a message; READY, LEASED, RETRYING,
    ACKNOWLEDGED, DEAD, FINISHED and UNKNOWN of a message and one group. In text they are written in lower case.
    """

    WAITING = 1  # for its delivery time, or held; in no queue
    QUEUED = 2  # in its queue: each group gets it, or got it
    UNKNOWN = 3  # never sent there, or forgotten since; of a group: nothing that is kept says what it did
    READY = 4  # the group gets it next, for the first time or again
    LEASED = 5  # handed out and not finished; or failed, and hidden in its place until its next attempt
    RETRYING = 6  # the group failed it; a copy waits for its next attempt
    ACKNOWLEDGED = 7
    DEAD = 8  # in the group's dead-letter queue, whatever became of it there
    FINISHED = 9  # the group does not get it again: it acknowledged it, or it was passed over
    RECALLED = 10  # before it was delivered
    REPLACED = 11  # before it was delivered, by another one with its own key
    ABSORBED = 12  # never stored: another one waited under its own key
    EXPIRED = 13  # removed from its queue by age or size

    @property
    def word(self) -> str:
        """As it is written in text."""
        return self.name.lower()
