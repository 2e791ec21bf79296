"""States of messages: the one table for all lists, displays and APIs."""

from __future__ import annotations

from enum import IntEnum


class MessageState(IntEnum):
    """State of a message, or of a message for one group; the numbers are those of ``rockdmq.admin.v1``.

    WAITING, QUEUED, RECALLED, REPLACED, ABSORBED, EXPIRED and UNKNOWN are states of a message; READY, LEASED, RETRYING,
    ACKNOWLEDGED, DEAD, FINISHED and UNKNOWN of a message for one group. In text they are in lower case.
    """

    WAITING = 1  # waits for its delivery time, or is held; in no queue
    QUEUED = 2  # in its queue: each group gets it, or got it
    UNKNOWN = 3  # never sent there, or forgotten since; for a group: no stored record shows its state
    READY = 4  # next to be delivered to the group, for the first time or again
    LEASED = 5  # delivered and not finished; or failed, and hidden until its next attempt
    RETRYING = 6  # the group failed it; a copy is pending for the next attempt
    ACKNOWLEDGED = 7
    DEAD = 8  # in the group's dead-letter queue, with any outcome there
    FINISHED = 9  # not delivered to the group again: acknowledged or skipped
    RECALLED = 10  # before delivery
    REPLACED = 11  # before delivery, by another message with the same own key
    ABSORBED = 12  # never stored: another message was pending under its own key
    EXPIRED = 13  # removed from its queue by age or size

    @property
    def word(self) -> str:
        """Word of the state in text."""
        return self.name.lower()
