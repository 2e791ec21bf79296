"""What operators, clocks and restored backups may do to messages, said a second time: who is still owed what.

A *debt* is one copy of a message that one group has not finished: where it lies in a queue of its topic, or in the
lane of the group after a failure. A debt ends by an acknowledgement, by a death that leaves a letter, or by an
operator. What comes to a group must be one of its debts, and at the end no debt is left: so nothing finished comes
again, and nothing is lost. The model is plain data, so a backup of it is a copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_ATTEMPTS, DELAYS_MS = 3, (1_000, 5_000)
STEADY_S = 600.0  # a clock that was set is believed after so long
Place = tuple[int, int]  # queue and offset


@dataclass(slots=True)
class Debt:
    """One copy of a message that a group has not finished. ``offset`` is that in the lane, once it was handed out."""

    message_id: str
    least: int = 1  # which attempt the next hand-out may be
    most: int = 1
    is_in_lane: bool = False
    offset: int | None = None
    handle: str = ""
    is_push: bool = False
    is_doubtful: bool = False  # an old handle was answered OK for it: it may be finished

    def hand_out(self, attempt: int, handle: str, *, is_push: bool) -> None:
        """It was handed out: the next attempt is the same again after a restart, or the next one after a failure."""
        self.least, self.most = attempt, attempt + 1
        self.handle, self.is_push, self.is_doubtful = handle, is_push, False


@dataclass(slots=True)
class Letter:
    """One dead letter, in the order of their queue."""

    message_id: str
    is_settled: bool = False  # redriven or purged


@dataclass(slots=True)
class Books:
    """Everything that is owed, and what is known of messages. ``at_s`` values are of a clock that never steps."""

    lying: dict[str, dict[Place, str]] = field(default_factory=dict)  # by topic
    stored_at_s: dict[str, dict[Place, float]] = field(default_factory=dict)
    sent_at_s: dict[tuple[str, str], float] = field(default_factory=dict)
    waiting: set[tuple[str, str]] = field(default_factory=set)
    queue_debts: dict[tuple[str, str], dict[Place, Debt]] = field(default_factory=dict)  # by group and topic
    lane_debts: dict[tuple[str, str], list[Debt]] = field(default_factory=dict)
    letters: dict[str, list[Letter]] = field(default_factory=dict)
    children: set[str] = field(default_factory=set)  # ids of redriven messages
    of_message_groups: set[str] = field(default_factory=set)  # of those, which are
    deaths: Counter[tuple[str, str]] = field(default_factory=Counter)  # group and id whose letter must be there
    stepped_at_s: float | None = None  # when the wall clock was last set to another time, to stay so
    keeps_s: dict[str, tuple[float, bool]] = field(default_factory=dict)  # by topic: how long, and also what is unread

    # -- what came into being -----------------------------------------------------------------------------------------

    def arrived(self, topic: str, place: Place, message_id: str, now_s: float) -> None:
        """A message came into a queue; every group that reads the topic is owed it."""
        self.lying.setdefault(topic, {})[place] = message_id
        self.stored_at_s.setdefault(topic, {})[place] = now_s
        self.waiting.discard((topic, message_id))
        for (_, read), debts in self.queue_debts.items():
            if read == topic:
                debts[place] = Debt(message_id)

    def subscribed(self, group: str, topic: str) -> None:
        """A group began to read a topic, at its beginning."""
        self.set_back(group, topic, dict(self.lying.get(topic, {})))
        self.lane_debts[group, topic] = []

    def set_back(self, group: str, topic: str, owed: dict[Place, str]) -> None:
        """A group goes on from somewhere; what is in its lane comes all the same."""
        self.queue_debts[group, topic] = {place: Debt(message_id) for place, message_id in owed.items()}

    # -- what came to groups ------------------------------------------------------------------------------------------

    def debt_of(self, group: str, topic: str, message_id: str, place: Place, attempt: int, *, is_in_lane: bool) -> Debt:
        """Return what a delivery pays; it is an error if nobody owes it."""
        if not is_in_lane:
            debt = self.queue_debts[group, topic].get(place)
            assert debt is not None, f"{message_id} came to {group} again from {place}, and was finished there"
            assert debt.message_id == message_id
        else:
            of_id = [each for each in self.lane_debts[group, topic] if each.message_id == message_id]
            here = [each for each in of_id if each.offset == place[1]]
            fitting = [each for each in of_id if each.offset is None and each.least <= attempt <= each.most]
            assert here or fitting, f"{message_id} came to {group} as a retry, attempt {attempt}; owed are {of_id}"
            debt = (here or fitting)[0]
            debt.offset = place[1]
        assert debt.least <= attempt <= min(debt.most, MAX_ATTEMPTS), f"attempt {attempt} for {debt}"
        return debt

    def finish(self, group: str, topic: str, debt: Debt) -> None:
        """A debt is paid."""
        if debt.is_in_lane:
            self.lane_debts[group, topic] = [each for each in self.lane_debts[group, topic] if each is not debt]
        else:
            debts = self.queue_debts[group, topic]
            self.queue_debts[group, topic] = {place: each for place, each in debts.items() if each is not debt}

    def die(self, group: str, topic: str, debt: Debt) -> None:
        """A debt becomes a dead letter."""
        self.finish(group, topic, debt)
        self.deaths[group, debt.message_id] += 1

    def fail(self, group: str, topic: str, debt: Debt, *, stays: bool) -> None:
        """A delivery failed: its next attempt comes from where it is or from the lane; after the last it is dead."""
        attempt = debt.least
        if attempt >= MAX_ATTEMPTS:
            self.die(group, topic, debt)
        elif stays:
            debt.least = debt.most = attempt + 1
            debt.handle = ""
        else:
            self.finish(group, topic, debt)
            self.lane_debts[group, topic].append(Debt(debt.message_id, attempt + 1, attempt + 1, is_in_lane=True))

    def debts(self) -> list[tuple[str, str, Debt]]:
        """Everything that is owed: group, topic, debt."""
        return [
            *((group, topic, each) for (group, topic), found in self.queue_debts.items() for each in found.values()),
            *((group, topic, each) for (group, topic), found in self.lane_debts.items() for each in found),
        ]

    def died_by_itself(self, group: str, message_id: str) -> None:
        """A letter is there that nobody asked for: a lease of the last attempt must have ended."""
        found = [
            (topic, debt)
            for of, topic, debt in self.debts()
            if of == group and debt.message_id == message_id and debt.handle and debt.least >= MAX_ATTEMPTS
        ]
        assert found, f"{message_id} of {group} died and had attempts left, or was finished"
        self.finish(group, found[0][0], found[0][1])

    def is_misled(self, now_s: float) -> bool:
        """Say whether a clock that was set to another time may be believed by now."""
        return self.stepped_at_s is not None and now_s - self.stepped_at_s >= STEADY_S

    # -- what operators do --------------------------------------------------------------------------------------------

    def group_removed(self, group: str) -> None:
        """Nothing is owed to a group that is gone; its letters stay."""
        for debts in (self.queue_debts, self.lane_debts):
            for each in [key for key in debts if key[0] == group]:
                del debts[each]

    def topic_removed(self, topic: str) -> None:
        """Nothing of a topic is owed to anybody."""
        for debts in (self.queue_debts, self.lane_debts):
            for each in [key for key in debts if key[1] == topic]:
                del debts[each]
        for table in (self.lying, self.stored_at_s, self.keeps_s):
            table.pop(topic, None)
        self.waiting = {key for key in self.waiting if key[0] != topic}
        self.sent_at_s = {key: at_s for key, at_s in self.sent_at_s.items() if key[0] != topic}

    def expired(self, topic: str, place: Place, now_s: float) -> None:
        """Retention removed a message: it was old, and read by all, unless the topic was told otherwise."""
        keep_s, with_unread = self.keeps_s.get(topic, (72 * 3_600.0, False))
        age_s = now_s - self.stored_at_s[topic][place]
        message_id = self.lying[topic][place]
        assert age_s >= keep_s or self.is_misled(now_s), (
            f"{message_id} was removed {age_s} s after it came, kept are {keep_s} s"
        )
        del self.stored_at_s[topic][place], self.lying[topic][place]
        for (group, read), debts in self.queue_debts.items():
            debt = debts.pop(place, None) if read == topic else None
            assert debt is None or with_unread or debt.is_doubtful, f"{message_id} was removed before {group} read it"
