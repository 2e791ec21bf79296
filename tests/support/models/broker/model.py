"""What the embedded broker must do, said a second time: no store, no queues, no threads, one dictionary per thing.

Messages are named ``(topic, message id)``; a dead letter is a message of its dead-letter queue. Every change of state
appends the fact the audit trail must hold. Where a message lies is not modelled, but for one thing: a *place* is left
when a copy goes on, and handles of a place that was left are good for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from broker_adapter.contracts.message import DeadLetterFacts
from broker_adapter.contracts.topics import dead_letter_topic
from dmq.store.files.steady_clock import STEP_MS
from dmq.trail.events import EventKind

Key = tuple[str, str]  # topic, message id
ALIVE_S, RENEWED_MS, RENEWED_MS_MAX, GONE_MS = 60.0, 60_000, 3 * 3_600_000, 1_000
STOOD_STILL_S = 15.0
# RocketMQ's delay levels, the first ones.
LEVELS_MS = (1_000, 5_000, 10_000, 30_000)
_DEATHS = {
    "exhausted": EventKind.DEAD_EXHAUSTED,
    "forwarded": EventKind.DEAD_FORWARDED,
    "sent_back": EventKind.DEAD_SENT_BACK,
}


class Fact(NamedTuple):
    """One audit event, as far as it is determined; ``group`` is empty for what happens to the message itself."""

    kind: EventKind
    key: Key
    group: str = ""
    attempt: int = 0
    at_ms: int = 0  # delivery time, or when it becomes visible; of an exhausted one the attempts that were allowed


class Policy(NamedTuple):
    """How a group's failures are answered; the last delay repeats."""

    max_attempts: int
    delays_ms: tuple[int, ...]

    def delay_ms(self, attempt: int) -> int:
        """How long to wait after a failed attempt."""
        return self.delays_ms[min(attempt, len(self.delays_ms)) - 1]


class Handle(NamedTuple):
    """A receipt handle, and the place it was given out for."""

    text: str
    place: int


class Entered(NamedTuple):
    """A message of a message group on its way into its queue."""

    deliver_at_ms: int
    accepted: int  # the how manieth
    key: Key


@dataclass
class Held:
    """One message as one group has it."""

    next_attempt: int = 1
    lease_attempt: int = 0  # of the last hand-out
    hidden_until_ms: int | None = None
    retry_at_ms: int | None = None  # when the copy that waits is due
    is_row: bool = False  # the lease outlives the run
    row_set_ms: int = 0  # when it was set, and until when, by the wall clock of then
    row_until_ms: int = 0
    retry_set_ms: int = 0  # when the copy began to wait
    is_push: bool = False
    is_suspended: bool = False
    renew_until_ms: int = 0  # 0: the lease is not renewed
    is_acked: bool = False
    is_dead: bool = False
    first_failed_ms: int = 0
    handles: list[Handle] = field(default_factory=list)
    run: int = 0  # in which the last handle was made
    is_spent: bool = False  # the last handle was used to fail it in its place
    place: int = 0
    left_in_run: dict[int, int] = field(default_factory=dict)  # by place

    @property
    def is_finished(self) -> bool:
        """Whether its group is done with it."""
        return self.is_acked or self.is_dead

    @property
    def is_available(self) -> bool:
        """Whether it is neither finished nor hidden nor waiting."""
        return not self.is_finished and self.hidden_until_ms is None and self.retry_at_ms is None

    @property
    def has_good_handle(self) -> bool:
        """Whether its last handle can still finish it."""
        return bool(self.handles) and self.handles[-1].place == self.place and not self.is_spent and not self.is_dead


class Choice(NamedTuple):
    """What a receive may hand out."""

    singles: dict[Key, Held]
    runs: list[dict[Key, Held]]  # of each message group, in order
    heads: int  # how many message groups may go on: their first message is not condemned
    condemned: dict[Key, Held]  # dead as soon as a receive comes by them: the policy allows them no more attempt
    is_plain: bool  # nothing else can take up room in a batch: what a receive comes by and may not hand out yet


class Model:
    """The state that operations and time lead to."""

    def __init__(self, message_group_of: Mapping[str, str], policies: Mapping[str, Policy]) -> None:
        self.run = 1
        self.message_group_of = message_group_of  # by message id
        self.policies = dict(policies)
        self.waiting: dict[Key, int] = {}
        self.queued: set[Key] = set()
        self.held: dict[str, dict[Key, Held]] = {}
        self.facts: list[Fact] = []
        self.recalled: dict[Key, int] = {}  # since when
        self.letters: dict[Key, DeadLetterFacts] = {}
        self.seen_s: float | None = None  # the push consumer's last sign of life, in time that counts
        self.counted_s = self._looked_s = 0.0  # time that counts, and all time, when somebody looked last
        self._stood_still_s = 0.0
        self.overdue: set[Key] = set()  # delayed, and sent when their time had come: only their acceptance orders them
        self.entered: dict[tuple[str, str], list[list[Entered]]] = {}  # by topic and message group, a list per turn
        self._accepted: dict[Key, int] = {}

    # -- producers, and what the timeline does ------------------------------------------------------------------------

    def send(self, key: Key, deliver_at_ms: int, now_ms: int) -> bool:
        """Accept a message; say whether it was known already."""
        if key in self.waiting or key in self.queued or key in self.recalled:
            return True
        self._accepted[key] = len(self._accepted)
        is_grouped = bool(self.message_group_of[key[1]])
        if deliver_at_ms > now_ms or (deliver_at_ms and is_grouped):
            self.waiting[key] = deliver_at_ms
            self.facts.append(Fact(EventKind.SCHEDULED, key, at_ms=deliver_at_ms))
            if deliver_at_ms <= now_ms:
                self.overdue.add(key)
        else:
            self.queued.add(key)
            self._enter([(0, key)])
            self.facts.append(Fact(EventKind.QUEUED, key, at_ms=deliver_at_ms))
        return False

    def recall(self, key: Key, now_ms: int) -> None:
        """Take back what waits."""
        self.facts.append(Fact(EventKind.RECALLED, key, at_ms=self.waiting.pop(key)))
        self.recalled[key] = now_ms

    def reschedule(self, key: Key, deliver_at_ms: int, now_ms: int) -> int:
        """Let what waits wait until another time; return that time. What is due already is on its way."""
        was_ms = self.waiting[key]
        at_ms = deliver_at_ms if deliver_at_ms > now_ms else min(was_ms, now_ms)
        if at_ms != was_ms:
            self.waiting[key] = at_ms
            self.facts.append(Fact(EventKind.RESCHEDULED, key, at_ms=at_ms))
        if at_ms <= now_ms:
            self.overdue.add(key)
        return at_ms

    def settle(self, now_ms: int, now_s: float) -> None:
        """Do what time does."""
        self.hand_over(now_ms)
        for group, key in self.expired(now_ms, now_s):
            self.end_lease(group, key, now_ms)

    def hand_over(self, now_ms: int) -> None:
        """Move what is due."""
        due = [key for key, at_ms in self.waiting.items() if at_ms <= now_ms]
        self._enter([(self.waiting[key], key) for key in due])
        for key in due:
            self.facts.append(Fact(EventKind.DELIVERED, key, at_ms=self.waiting.pop(key)))
            self.queued.add(key)
        for group, messages in self.held.items():
            for key, held in messages.items():
                if held.retry_at_ms is not None and held.retry_at_ms <= now_ms:
                    self.facts.append(Fact(EventKind.RETRIED, key, group, held.next_attempt, held.retry_at_ms))
                    held.retry_at_ms = None

    def _enter(self, messages: list[tuple[int, Key]]) -> None:
        turn: dict[tuple[str, str], list[Entered]] = {}
        for at_ms, key in messages:
            line = (key[0], self.message_group_of[key[1]])
            turn.setdefault(line, []).append(Entered(at_ms, self._accepted[key], key))
        for line, entered in turn.items():
            self.entered.setdefault(line, []).append(sorted(entered))

    def order(self, topic: str, message_group: str) -> list[Key]:
        """The promised order of a message group in its queue, without those that were overdue when they were sent."""
        turns = self.entered.get((topic, message_group), [])
        return [each.key for turn in turns for each in turn if each.key not in self.overdue]

    # -- leases -------------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Let time count for who is alive, unless nobody looked for so long that the process stood still."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._stood_still_s += passed_s if passed_s > STOOD_STILL_S else 0
        self.counted_s = now_s - self._stood_still_s

    def client_seen(self) -> None:
        """Note a sign of life of the push consumer."""
        self.seen_s = self.counted_s

    def _is_client_alive(self) -> bool:
        return self.seen_s is not None and self.counted_s - self.seen_s < ALIVE_S

    def expired(self, now_ms: int, now_s: float) -> list[tuple[str, Key]]:
        """Leases that are over; those of a living push consumer are renewed instead."""
        self.look(now_s)
        found = []
        for group, messages in self.held.items():
            for key, held in messages.items():
                if held.hidden_until_ms is None or held.hidden_until_ms > now_ms:
                    continue
                if now_ms < held.renew_until_ms and self._is_client_alive():
                    held.hidden_until_ms = min(now_ms + RENEWED_MS, held.renew_until_ms)
                else:
                    found.append((group, key))
        return found

    def end_lease(self, group: str, key: Key, now_ms: int, kind: EventKind = EventKind.LEASE_EXPIRED) -> None:
        """Bring back what nobody finished in time, or bury it."""
        held = self.held[group][key]
        if not held.is_suspended and held.lease_attempt >= self.policies[group].max_attempts:
            self.bury(group, key, now_ms, "exhausted", held.lease_attempt)
            return
        if not held.is_suspended:
            held.first_failed_ms = held.first_failed_ms or now_ms
        held.next_attempt = held.lease_attempt + (not held.is_suspended)
        held.hidden_until_ms, held.is_row, held.renew_until_ms = None, False, 0
        self.facts.append(Fact(kind, key, group, held.next_attempt))

    def client_gone(self, now_ms: int) -> None:
        """Let the leases of the push consumer end soon."""
        if self.seen_s is None:
            return
        self.seen_s = None
        for messages in self.held.values():
            for held in messages.values():
                if held.hidden_until_ms is not None and held.renew_until_ms:
                    held.hidden_until_ms = min(held.hidden_until_ms, now_ms + GONE_MS)
                    held.renew_until_ms = 0

    # -- consumers ----------------------------------------------------------------------------------------------------

    def choice(self, group: str, topic: str, lines: Mapping[str, Sequence[Key]], *, is_push: bool) -> Choice:
        """What a receive may hand out; ``lines`` are the message groups of the topic, in order."""
        messages = self.held.setdefault(group, {})
        max_attempts = self.policies[group].max_attempts
        condemned: dict[Key, Held] = {}

        def is_allowed(key: Key) -> bool:
            if messages[key].next_attempt > max_attempts:
                condemned[key] = messages[key]
            return key not in condemned

        singles = {}
        for key in self.queued:
            held = messages.setdefault(key, Held()) if key[0] == topic else None
            if held is not None and held.is_available and not self.message_group_of[key[1]] and is_allowed(key):
                singles[key] = held
        runs, heads = [], 0
        for line in lines.values():
            unfinished = [key for key in line if not messages[key].is_finished]
            out = next((at for at, key in enumerate(unfinished) if not messages[key].is_available), len(unfinished))
            in_front = unfinished[: min(out, 1) if is_push else out]
            runs.append({key: messages[key] for key in takewhile(is_allowed, in_front)})
            heads += bool(runs[-1])
        is_plain = not condemned and all(messages[key].is_finished for line in lines.values() for key in line)
        return Choice(singles, runs, heads, condemned, is_plain)

    def hand_out(self, held: Held, handle: str, now_ms: int, invisible_ms: int, *, is_push: bool) -> None:
        """Lease a message."""
        held.lease_attempt, held.run = held.next_attempt, self.run
        held.hidden_until_ms, held.is_row, held.is_suspended = now_ms + invisible_ms, False, False
        held.is_push, held.is_spent = is_push, False
        held.renew_until_ms = now_ms + RENEWED_MS_MAX if is_push else 0
        if is_push and not self._is_client_alive():  # a receive is a sign of life
            self.client_seen()
        held.handles.append(Handle(handle, held.place))

    def ack(self, group: str, key: Key) -> None:
        """Acknowledge with the last handle, the first time or again."""
        held = self.held[group][key]
        if not held.is_finished:
            held.is_acked, held.hidden_until_ms = True, None
            self.facts.append(Fact(EventKind.ACKED, key, group, held.lease_attempt))

    def hide(self, group: str, key: Key, now_ms: int, invisible_ms: int, *, suspend: bool) -> None:
        """Change the invisible duration with the last handle."""
        held = self.held[group][key]
        if held.is_push and not suspend:
            self.fail(group, key, now_ms, not_before_ms=now_ms + invisible_ms)
            return
        held.hidden_until_ms, held.is_row, held.is_suspended = now_ms + invisible_ms, True, suspend
        held.row_set_ms, held.row_until_ms = now_ms, now_ms + invisible_ms
        held.renew_until_ms = 0
        if invisible_ms:
            at_ms = now_ms + invisible_ms
            self.facts.append(Fact(EventKind.INVISIBLE_CHANGED, key, group, held.lease_attempt, at_ms))
        else:
            self.end_lease(group, key, now_ms, EventKind.GIVEN_BACK)

    def give_up(self, group: str, key: Key, now_ms: int, attempts: int) -> None:
        """Forward to the dead-letter queue; a push consumer is believed from the last attempt on."""
        held = self.held[group][key]
        if not held.is_push:
            self.bury(group, key, now_ms, "forwarded", held.lease_attempt)
        else:
            is_last = attempts >= self.policies[group].max_attempts
            self.fail(group, key, now_ms, attempts_told=attempts if is_last else 0)

    def send_back(self, group: str, key: Key, now_ms: int, level: int) -> None:
        """Give back with a delay level."""
        if level < 0:
            self.bury(group, key, now_ms, "sent_back", self.held[group][key].lease_attempt)
        else:
            self.fail(group, key, now_ms, delay_ms=LEVELS_MS[level - 1] if level else None)

    def fail(
        self,
        group: str,
        key: Key,
        now_ms: int,
        *,
        not_before_ms: int = 0,
        attempts_told: int = 0,
        delay_ms: int | None = None,
    ) -> None:
        """Let a delivery fail: try again later, or bury it."""
        held, policy = self.held[group][key], self.policies[group]
        attempts = max(held.lease_attempt, attempts_told)
        if attempts >= policy.max_attempts:
            self.bury(group, key, now_ms, "exhausted", attempts)
            return
        at_ms = now_ms + (policy.delay_ms(attempts) if delay_ms is None else delay_ms)
        at_ms = max(at_ms, not_before_ms)
        held.first_failed_ms = held.first_failed_ms or now_ms
        stays = bool(self.message_group_of[key[1]]) or key in self.letters  # where it is, and hides
        kind = EventKind.POSTPONED if stays else EventKind.NACKED
        self.facts.append(Fact(kind, key, group, held.lease_attempt, at_ms))
        held.is_suspended, held.renew_until_ms = False, 0
        if stays:
            held.hidden_until_ms, held.is_row, held.is_spent = at_ms, True, True
            held.row_set_ms, held.row_until_ms = now_ms, at_ms
            return
        self._leave(held)
        held.next_attempt = held.lease_attempt + 1
        held.retry_at_ms, held.retry_set_ms = at_ms, now_ms

    def bury(self, group: str, key: Key, now_ms: int, reason: str, attempts: int) -> None:
        """Put a message into the group's dead-letter queue."""
        held = self.held[group][key]
        allowed = self.policies[group].max_attempts if reason == "exhausted" else 0
        self.facts.append(Fact(_DEATHS[reason], key, group, attempts, allowed))
        self._leave(held)
        held.is_dead = True
        letter = (dead_letter_topic(group), key[1])
        assert letter not in self.queued, f"{key} died twice"
        self.queued.add(letter)
        self.letters[letter] = DeadLetterFacts(*key, attempts, reason, held.first_failed_ms or now_ms, now_ms)

    def _leave(self, held: Held) -> None:
        held.left_in_run[held.place] = self.run
        held.place += 1
        held.hidden_until_ms, held.is_row = None, False

    # -- ends and figures ---------------------------------------------------------------------------------------------

    def restart(self, now_ms: int) -> None:
        """Forget what only memory knew: leases that were never renewed, and who is alive."""
        self.run += 1
        self.seen_s = None
        for messages in self.held.values():
            for held in messages.values():
                held.renew_until_ms = 0
                if not held.is_row:
                    held.hidden_until_ms = None
                elif held.hidden_until_ms is not None:  # what is left of it, and never more than it was
                    left_ms = min(max(0, held.row_until_ms - now_ms), held.row_until_ms - held.row_set_ms)
                    held.hidden_until_ms = now_ms + left_ms

    def stepped(self, by_ms: int, noticed_ms: int, now_ms: int) -> None:
        """The wall clock was set: leases end when they would have; retries that began in the future are moved.

        ``noticed_ms`` is what the daemon saw: several small steps within a second are one.
        """
        for messages in self.held.values():
            for held in messages.values():
                if held.hidden_until_ms is not None:
                    held.hidden_until_ms += by_ms
                    held.renew_until_ms += by_ms if held.renew_until_ms else 0
                if noticed_ms > -STEP_MS or held.retry_at_ms is None or held.retry_set_ms <= now_ms:
                    continue
                own_ms = held.retry_at_ms - held.retry_set_ms
                at_ms = max(now_ms + 1, min(held.retry_at_ms + noticed_ms, now_ms + own_ms))
                if at_ms < held.retry_at_ms:
                    held.retry_at_ms, held.retry_set_ms = at_ms, at_ms - own_ms

    def due_counts(self, scope: str, bucket_ms: int) -> dict[int, int]:
        """How many wait for a topic, or as retries of a group, by the end of their time bucket."""
        retries = [held.retry_at_ms for held in self.held.get(scope, {}).values() if held.retry_at_ms is not None]
        times = [at_ms for key, at_ms in self.waiting.items() if key[0] == scope] + retries
        return Counter((at_ms // bucket_ms + 1) * bucket_ms for at_ms in times)


def check_taken(choice: Choice, taken: Sequence[Key], batch_max: int) -> None:
    """Nothing early, hidden, finished or out of order came, nothing came twice, and as much as there was."""
    singles, runs, heads = choice.singles, choice.runs, choice.heads
    assert len(set(taken)) == len(taken)
    upper = len(singles) + sum(len(run) for run in runs)
    assert len(taken) <= min(batch_max, upper)
    assert set(taken) <= singles.keys() | {key for run in runs for key in run}
    for run in runs:
        came = [key for key in taken if key in run]
        assert came == list(run)[: len(came)], "out of order"
    if choice.is_plain:
        assert len(taken) == min(batch_max, upper)
    if heads or singles:
        assert taken, "nothing came"
    if batch_max == 1_000:  # more than there are
        assert singles.keys() <= set(taken)
        assert sum(any(key in run for key in taken) for run in runs) >= heads
