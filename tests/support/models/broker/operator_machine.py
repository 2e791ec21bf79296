"""Rules of a state machine in which operators, a restored backup and the host's clock meet consumers that fail.

The model (``operator_model``) knows who is owed what. What lies in queues is looked up in the store after every rule,
and each arrival, removal and dead letter must have a reason.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.forges.messages.letters import PURGE, REDRIVE, Break, BreakingEngine, a_message, in_lanes, queued
from support.models.broker.operator_model import DELAYS_MS, MAX_ATTEMPTS, STEADY_S, Books, Debt, Letter, Place
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import Backup, EmbeddedRig, End, receive, until

from broker_adapter.contracts.errors import BrokerError, Refused, Rule
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt, unpack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire.mapping import decode
from dmq.broker.operations.admin import BEGIN, END
from dmq.broker.topics.settings import IndexChange, KeepChange
from dmq.errors import StoreError
from dmq.store.engines.engine import Engine
from dmq.store.files.steady_clock import ClockOptions
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.store import StoreOptions
from dmq.trail.events import EventKind, gap_event
from retry.dead_letter import PARENT_MESSAGE_ID, Job, JobKind, JobState
from retry.policy import RetryPolicy, Table

_T = TypeVar("_T")
TOPICS, GROUPS, CLIENT = ("orders", "elsewhere"), ("workers", "auditors"), "client-1"
YEAR_MS, WINDOW_MS = 365 * 86_400_000, 15 * 60_000
ROUNDS, ROUND_MS = 12, 600_000  # what waits at the end must have come by then
picks = st.integers(0, 10_000)
topics = st.sampled_from((*TOPICS[:1] * 4, *TOPICS[1:]))
groups = st.sampled_from((*GROUPS[:1] * 3, *GROUPS[1:]))
ACTS = (
    *("send", "take", "ack", "fail", "give up", "begin", "anew", "purge"),
    *("redrive", "kill", "back up", "restore", "old handle"),
)
stories = st.sets(st.sampled_from(ACTS), min_size=2, max_size=6).flatmap(
    lambda acts: st.lists(st.sampled_from(sorted(acts)), min_size=4, max_size=12)
)
CLOCK_STEPS = (1_000, 66_000, 16 * 60_000, YEAR_MS)


class Given(NamedTuple):
    """A handle that was given out, and for what."""

    group: str
    topic: str
    message_id: str
    place: Place
    is_in_lane: bool
    handle: str
    store: int  # how often a backup had been restored


class OperatorRules(RuleBasedStateMachine):
    """One history, without its ends."""

    on_disk: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.now_s = 0.0  # of no clock that can be set
        self.numbers = 0
        self.is_sound = True
        self.stores = 0
        self.handles: list[Given] = []
        self.backup: tuple[Backup, Books] | None = None
        self.loop = asyncio.new_event_loop()
        self.strays: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.strays.append(repr(context)))
        self.folder = tempfile.TemporaryDirectory(prefix="dmq-operators-")
        self.engine: BreakingEngine
        self.rig: EmbeddedRig
        self.clock = ManualClock()

    def _wrapped(self, engine: Engine) -> Engine:
        self.engine = BreakingEngine(engine)
        return self.engine

    def run(self, work: Coroutine[object, object, _T]) -> _T:
        """Run a coroutine on the machine's loop."""
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @initialize(jump_max_ms=st.sampled_from((None, 10 * 60_000)))
    def open(self, jump_max_ms: int | None) -> None:
        """Make all names, in a store that follows the clock at once, or that waits after a long step forward."""
        self.rig = EmbeddedRig(
            Path(self.folder.name),
            on_disk=self.on_disk,
            queues=2,
            options=StoreOptions(
                idempotency_window_ms=WINDOW_MS,
                gap_event=gap_event,
                clock=ClockOptions(jump_max_ms=jump_max_ms),
            ),
            clock=self.clock,
            wrap=self._wrapped,
        )
        self.run(self.rig.open())
        for topic in TOPICS:
            self.make_topic(topic)
        for group in GROUPS:
            self.make_group(group)

    # -- names --------------------------------------------------------------------------------------------------------

    def make_topic(self, topic: str) -> None:
        """Make a topic, and let every group read it from its beginning."""
        self.run(self.rig.broker.operator.create_topic(topic, queues=2, message_type=None))
        self.run(self.rig.broker.operator.set_topic(topic, index=IndexChange(("color",))))
        for group in GROUPS:
            if group in self.rig.broker.names.groups:
                self.subscribe(group, topic)

    def make_group(self, group: str) -> None:
        """Make a group, and let it read every topic from its beginning."""
        policy = RetryPolicy(backoff=Table(DELAYS_MS), max_attempts=MAX_ATTEMPTS)
        self.run(self.rig.broker.set_group(group, policy=policy))
        for topic in TOPICS:
            self.subscribe(group, topic)

    def subscribe(self, group: str, topic: str) -> None:
        """Let a group begin with a topic."""
        self.run(self.rig.broker.subscriptions.subscribe(group, topic))
        self.books.subscribed(group, topic)

    # -- producers ----------------------------------------------------------------------------------------------------

    @rule(topic=topics, count=st.integers(1, 3), delay_ms=st.sampled_from((None, None, 1_000, 61_000)))
    def send(self, topic: str, count: int, delay_ms: int | None) -> None:
        """New messages, each third of a message group."""
        for _ in range(count):
            self.numbers += 1
            message_id = f"m-{self.numbers}"
            at_ms = self.clock.now_ms() + delay_ms if delay_ms is not None else 0
            envelope = a_message(message_id, topic=topic, message_group=_message_group(message_id), deliver_at_ms=at_ms)
            (receipt,) = self.run(self._send(envelope))
            assert not receipt.repeated
            self.books.sent_at_s[topic, message_id] = self.now_s
            self.books.waiting.add((topic, message_id))
        self.settle()

    async def _send(self, envelope: Envelope) -> Sequence[SendReceipt]:
        return await self.rig.broker.send([envelope])

    @precondition(lambda self: self.repeatable())
    @rule(pick=picks)
    def send_again(self, pick: int) -> None:
        """Within the window an id is known, whatever the clock was set to."""
        found = self.repeatable()
        topic, message_id = found[pick % len(found)]
        envelope = a_message(message_id, topic=topic, message_group=_message_group(message_id))
        (receipt,) = self.run(self._send(envelope))
        assert receipt.repeated, f"{message_id} was stored again"
        self.settle()

    def repeatable(self) -> list[tuple[str, str]]:
        """What was sent a short while ago."""
        return [key for key, at_s in self.books.sent_at_s.items() if self.now_s - at_s < WINDOW_MS / 1_000 - 1]

    # -- time ---------------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from((1, 1_000, 5_000, 31_000, 61_000)), is_suspended=st.booleans())
    def advance(self, ms: int, *, is_suspended: bool) -> None:
        """Time passes, while the machine runs or sleeps."""
        self.pass_time(ms, is_suspended=is_suspended)

    def pass_time(self, ms: int, *, is_suspended: bool = False) -> None:
        """Let time pass on both sides."""
        if is_suspended:
            self.clock.suspend(ms)
        else:
            self.clock.advance(ms)
        self.now_s += ms / 1_000
        self.settle()

    @rule(ms=st.sampled_from(CLOCK_STEPS), is_forward=st.booleans(), lasts_ms=st.sampled_from((0, 600, 2_000)))
    def step_and_back(self, ms: int, lasts_ms: int, *, is_forward: bool) -> None:
        """The host's clock is wrong for a moment; something may come about meanwhile, and retention looks."""
        by_ms = ms if is_forward else -ms
        self.clock.step_to(self.clock.now_ms() + by_ms)
        self.pass_time(lasts_ms)
        self.run(self.rig.broker.retention.turn())
        self.clock.step_to(self.clock.now_ms() - by_ms)
        self.settle()

    @rule(ms=st.sampled_from(CLOCK_STEPS[:3]), is_forward=st.booleans())
    def step(self, ms: int, *, is_forward: bool) -> None:
        """The host's clock is set, and stays so."""
        self.books.stepped_at_s = self.now_s
        self.clock.step_to(self.clock.now_ms() + (ms if is_forward else -ms))
        self.settle()

    @rule()
    def step_a_year(self) -> None:
        """The host's clock is set far ahead, and stays so. (Back, what has a date would wait for its date.)"""
        self.books.stepped_at_s = self.now_s
        self.clock.step_to(self.clock.now_ms() + YEAR_MS)
        self.settle()

    @rule()
    def accept(self) -> None:
        """An operator says that the clock is right, whatever it says, and retention looks."""
        self.rig.store.clock.accept("it is right")
        if self.books.stepped_at_s is not None:
            self.books.stepped_at_s = -STEADY_S
        self.run(self.rig.broker.retention.turn())
        self.settle()

    def settle(self) -> None:
        """Let time do its work, and find a reason for everything that came about."""
        self.run(self.rig.settle())
        self.look()

    def look(self) -> None:
        """Compare what lies in the store with what may: arrivals, removals, deaths."""
        self.is_sound = False  # if this fails, nothing more can be said at the end
        for topic in TOPICS:
            self.look_at_topic(topic)
        for group in GROUPS:
            self.look_at_letters(group)
        self.rig.check_ledger(every=4)
        self.is_sound = True

    def look_at_topic(self, topic: str) -> None:
        """Each message is one that was sent or redriven and lies there once; what is gone may be."""
        lying = self.books.lying.setdefault(topic, {})
        found = {(queue, offset): unpack_id(record.message_id) for queue, offset, record in queued(self.rig, topic)}
        for place, message_id in found.items():
            if place in lying:
                assert lying[place] == message_id, f"{place} of {topic} held {lying[place]} and holds {message_id}"
                continue
            assert (topic, message_id) in self.books.waiting, f"{message_id} is at {place} of {topic}: {lying}"
            self.books.arrived(topic, place, message_id, self.now_s)
        for place in [place for place in lying if place not in found]:
            self.books.expired(topic, place, self.now_s)

    def look_at_letters(self, group: str) -> None:
        """Every death has its letter, and every letter its death."""
        name = dead_letter_topic(group)
        lying = queued(self.rig, name) if name in self.rig.broker.names.topics else []
        known = self.books.letters.setdefault(group, [])
        ids = [unpack_id(record.message_id) for _, _, record in lying]
        while known and self.books.is_misled(self.now_s) and known[0].message_id not in ids[:1]:
            del known[0]
        assert ids[: len(known)] == [each.message_id for each in known], f"letters of {group} are gone"
        for message_id in ids[len(known) :]:
            if self.books.deaths[group, message_id]:
                self.books.deaths[group, message_id] -= 1
            else:
                self.books.died_by_itself(group, message_id)
            known.append(Letter(message_id))
        missing = [key for key, count in self.books.deaths.items() if count and key[0] == group]
        assert not missing, f"died without a letter: {missing}"

    # -- consumers ----------------------------------------------------------------------------------------------------

    @rule(group=groups, topic=topics, batch_max=st.sampled_from((1, 2, 32)), is_push=st.booleans())
    def receive(self, group: str, topic: str, batch_max: int, *, is_push: bool) -> None:
        """What comes is owed."""
        self.take(group, topic, batch_max, is_push=is_push)

    def take(self, group: str, topic: str, batch_max: int, *, is_push: bool = False) -> list[Debt]:
        """Receive on both sides."""
        renew_for = CLIENT if is_push else ""
        work = receive(self.rig, group=group, topic=topic, batch_max=batch_max, renew_for=renew_for)
        found = self.run(work)
        self.settle()  # what the receive came by that has no attempt left
        return [self.note_delivery(group, each, is_push=is_push) for each in found]

    def note_delivery(self, group: str, each: Delivery, *, is_push: bool) -> Debt:
        """Find what a delivery pays."""
        is_in_lane = _topic_id_in(each.receipt_handle) != self.rig.broker.names.topics[each.topic].topic_id
        place = (each.queue_id, each.queue_offset)
        attempt = each.delivery_attempt
        debt = self.books.debt_of(group, each.topic, each.message_id, place, attempt, is_in_lane=is_in_lane)
        debt.hand_out(attempt, each.receipt_handle, is_push=is_push)
        given = Given(group, each.topic, each.message_id, place, is_in_lane, each.receipt_handle, self.stores)
        self.handles.append(given)
        return debt

    @rule(group=groups, acts=stories)
    def live_through(self, group: str, acts: list[str]) -> None:  # noqa: C901 - a table of what can happen
        """Much happens to one group in one topic: what is rare among many rules is common here."""
        topic = TOPICS[0]
        for act in acts:
            match act:
                case "fail" | "ack" | "give up":
                    self.consume_each(group, topic, [act])
                case "send":
                    self.send(topic, 1, None)
                case "take":
                    self.take(group, topic, 32, is_push=True)
                case "old handle" if self.old_handles():
                    self.use_an_old_handle(len(self.old_handles()) - 1)
                case "begin":
                    self.reset(group, topic, BEGIN, 0, dies=False)
                case "anew":
                    self.remove_group(group, 0, dies=False)
                case "purge":
                    self.purge(group, 0, dies=False)
                case "redrive":
                    self.redrive(group, "", 0, dies=False)
                case "kill":
                    self.begin_again(End.KILL)
                case "back up" if self.backup is None:
                    self.back_up()
                case "restore" if self.backup is not None:
                    self.restore()

    @rule(
        group=groups, topic=topics, hows=st.lists(st.sampled_from(("ack", "fail", "give up")), min_size=1, max_size=3)
    )
    def consume(self, group: str, topic: str, hows: list[str]) -> None:
        """A consumer that finishes some and fails others."""
        self.consume_each(group, topic, hows)

    def consume_each(self, group: str, topic: str, hows: list[str]) -> None:
        """A push consumer that takes all there is, and finishes or fails it; then time passes."""
        for at, debt in enumerate(self.take(group, topic, 32, is_push=True)):
            self.do(hows[at % len(hows)], group, topic, debt)
        self.pass_time(5_000)

    @precondition(lambda self: self.in_hand())
    @rule(pick=picks, how=st.sampled_from(("ack", "fail", "give up", "send back", "bury")))
    def finish(self, pick: int, how: str) -> None:
        """With the last handle of a delivery."""
        found = self.in_hand()
        group, topic, debt = found[pick % len(found)]
        self.do(how, group, topic, debt)
        self.settle()

    def in_hand(self) -> list[tuple[str, str, Debt]]:
        """Debts whose handle was not used up."""
        return [each for each in self.books.debts() if each[2].handle and not each[2].is_doubtful]

    def do(self, how: str, group: str, topic: str, debt: Debt) -> None:
        """Do one thing with a delivery, on both sides; if its lease is over, it may be refused, and nothing happens."""
        broker, handle = self.rig.broker, debt.handle
        if how == "ack":
            (told,) = self.run(broker.ack(group, topic, [handle]))
            if told is None:
                self.books.finish(group, topic, debt)
            else:
                assert isinstance(told, Refused)
                debt.handle = ""
            return
        works: dict[str, Callable[[], Coroutine[object, object, object]]] = {
            "fail": lambda: broker.change_invisible(group, topic, handle, 0),
            "give up": lambda: broker.dead_letter(group, topic, handle, attempts=MAX_ATTEMPTS),
            "send back": lambda: broker.send_back(group, topic, handle, 0),
            "bury": lambda: broker.send_back(group, topic, handle, -1),
        }
        try:
            self.run(works[how]())
        except Refused as refused:
            if refused.rule is not Rule.RECEIPT_HANDLE:
                raise
            debt.handle = ""
            return
        stays = bool(_message_group(debt.message_id)) or debt.message_id in self.books.of_message_groups
        if how in {"bury", "give up"}:
            self.books.die(group, topic, debt)
        elif how == "fail" and not debt.is_push:
            debt.least, debt.most, debt.handle = debt.least, debt.least + 1, ""  # given back
        else:
            self.books.fail(group, topic, debt, stays=stays)

    @precondition(lambda self: self.old_handles())
    @rule(pick=picks)
    def use_an_old_handle(self, pick: int) -> None:
        """It is refused, or good for the very message it was given out for."""
        found = self.old_handles()
        given = found[pick % len(found)]
        if given.group not in self.rig.broker.names.groups:
            return
        (told,) = self.run(self.rig.broker.ack(given.group, given.topic, [given.handle]))
        if isinstance(told, Refused):
            return
        assert told is None
        debts = [each for *of, each in self.books.debts() if of == [given.group, given.topic]]
        for debt in debts:
            place = debt.offset if debt.is_in_lane else None
            if debt.message_id == given.message_id and (place is None or place == given.place[1]):
                debt.is_doubtful = True
        self.settle()

    def old_handles(self) -> list[Given]:
        """Handles that are not the last one of what they were given out for."""
        good = {debt.handle for _, _, debt in self.books.debts()}
        return [given for given in self.handles if given.handle not in good]

    # -- operators ----------------------------------------------------------------------------------------------------

    @rule(group=groups, topic=topics, to=st.sampled_from((BEGIN, BEGIN, END, 5_000)), dies=st.booleans(), pick=picks)
    def reset(self, group: str, topic: str, to: int, pick: int, *, dies: bool) -> None:
        """A group goes back or forth; the death of the process leaves it before or behind."""
        at = to if to < 0 else self.clock.now_ms() - to
        before = self.count(EventKind.RESET)
        first = self.operate(self.rig.broker.operator.reset_group(group, topic, at), pick if dies else None)
        if first is None and self.count(EventKind.RESET) == before:
            return
        told = [
            (record.queue_offset, event.queue_id)
            for record, event in read_outbox(self.rig.store)
            if event.kind is EventKind.RESET
        ]
        starts = {queue_id: offset for offset, queue_id in told[before:]}
        assert first is None or starts == dict(enumerate(first)), "the trail says otherwise"
        lying = self.books.lying.get(topic, {})
        if to == BEGIN:
            assert all(starts[queue] <= offset for queue, offset in lying)
        if to == END:
            assert not any(starts[queue] <= offset for queue, offset in lying)
        owed = {place: message_id for place, message_id in lying.items() if starts[place[0]] <= place[1]}
        self.books.set_back(group, topic, owed)
        self.settle()

    @rule(group=groups, dies=st.booleans(), pick=picks)
    def remove_group(self, group: str, pick: int, *, dies: bool) -> None:
        """A group is removed, and made anew: it begins at the beginning. Its dead letters stay."""
        before = self.rig.broker.names.groups[group].group_id
        self.operate(self.rig.broker.operator.remove_group(group, is_forced=True), pick if dies else None)
        if group in self.rig.broker.names.groups:
            assert self.rig.broker.names.groups[group].group_id == before
            return
        self.books.group_removed(group)
        self.make_group(group)
        self.settle()

    @rule(topic=topics, dies=st.booleans(), pick=picks)
    def remove_topic(self, topic: str, pick: int, *, dies: bool) -> None:
        """A topic is removed with all that is in it, and made anew."""
        self.operate(self.rig.broker.operator.remove_topic(topic, is_forced=True), pick if dies else None)
        if topic in self.rig.broker.names.topics:
            return
        self.books.topic_removed(topic)
        self.make_topic(topic)
        self.settle()

    @rule(group=groups, to=st.sampled_from(("", "", "all", TOPICS[1])), dies=st.booleans(), pick=picks)
    def redrive(self, group: str, to: str, pick: int, *, dies: bool) -> None:
        """Each letter without an outcome becomes one new message: of the group, unless it is told to be everybody's."""
        job = replace(REDRIVE, group=group, to_topic=to if to in TOPICS else "", all_groups=to == "all")
        self.job(job, pick if dies else None)

    @rule(group=groups, dies=st.booleans(), pick=picks)
    def purge(self, group: str, pick: int, *, dies: bool) -> None:
        """Each letter without an outcome has one."""
        self.job(replace(PURGE, group=group), pick if dies else None)

    def job(self, job: Job, pick: int | None) -> None:
        """Do a job to its end, or let it die on the way and go on in the next run."""
        if dead_letter_topic(job.group) not in self.rig.broker.names.topics:
            return
        before = {each.job_id for each in self.rig.broker.dead_letters.jobs()}
        self.operate(self._job(job), pick)
        if not {each.job_id for each in self.rig.broker.dead_letters.jobs()} - before:
            assert pick is not None
            return
        letters = [each for each in self.books.letters[job.group] if not each.is_settled]
        for each in letters:
            each.is_settled = True
        if job.kind is JobKind.REDRIVE:
            self.note_children(job, Counter(each.message_id for each in letters))
        self.settle()

    def note_children(self, job: Job, parents: Counter[str]) -> None:
        """Find the new message of each letter."""
        found: Counter[str] = Counter()
        is_for_all = job.all_groups or bool(job.to_topic)
        for topic in TOPICS:
            lying = self.books.lying.get(topic, {})
            for queue, offset, record in queued(self.rig, topic):
                message_id = unpack_id(record.message_id)
                if (queue, offset) in lying or (topic, message_id) in self.books.waiting:
                    continue
                found[decode(record.payload).properties[PARENT_MESSAGE_ID]] += 1
                assert is_for_all
                self.books.waiting.add((topic, message_id))
                self.books.children.add(message_id)
                self.note_message_group(record)
            for group, record in in_lanes(self.rig, topic):
                message_id, message = unpack_id(record.message_id), decode(record.payload)
                parent = message.properties.get(PARENT_MESSAGE_ID, "")
                if not parent or message_id in self.books.children:
                    continue
                assert group == job.group
                assert not is_for_all
                found[parent] += 1
                self.books.children.add(message_id)
                self.note_message_group(record)
                self.books.lane_debts[group, topic].append(Debt(message_id, is_in_lane=True))
        assert found == parents, f"redriven are {found}, and should be {parents}"

    def note_message_group(self, record: QueuedMessage) -> None:
        """A redriven message has the message group of its letter."""
        if record.message_group:
            self.books.of_message_groups.add(unpack_id(record.message_id))

    async def _job(self, job: Job) -> None:
        await self.rig.broker.dead_letters.start(job, is_dry_run=False)
        await self.jobs_end()

    async def jobs_end(self) -> None:
        """Wait until no job runs, or the store broke."""
        jobs = self.rig.broker.dead_letters.jobs
        await until(
            lambda: self.rig.store.failure is not None or all(each.state is not JobState.RUNNING for each in jobs())
        )
        await self.rig.store.commit_async([])

    @precondition(lambda self: self.numbers)
    @rule(topic=topics)
    def add_a_queue(self, topic: str) -> None:
        """Everybody reads it, from its start; refused where there are message groups."""
        queues = self.rig.broker.names.topics[topic].queues
        if queues < 4:
            with suppress(Refused):
                self.run(self.rig.broker.operator.set_topic(topic, queues=queues + 1, settings=None))
        self.settle()

    @rule(topic=topics, keep_s=st.sampled_from((None, 60, 3_600)), unread=st.booleans())
    def keep(self, topic: str, keep_s: int | None, *, unread: bool) -> None:
        """Say how long a topic keeps what it has, and let it be looked at."""
        wanted = KeepChange(keep_s * 1_000 if keep_s else 0, unread="yes" if unread else "no")
        self.run(self.rig.broker.operator.set_topic(topic, queues=0, settings=None, keep=wanted))
        self.books.keeps_s[topic] = (keep_s or float("inf"), not unread)
        self.run(self.rig.broker.retention.turn())
        self.settle()

    @rule(topic=topics, dies=st.booleans(), pick=picks)
    def index(self, topic: str, pick: int, *, dies: bool) -> None:
        """Index a property that each message has, or remove its index."""
        is_indexed = bool(self.rig.broker.names.topics[topic].index_properties)
        change = IndexChange((), ("color",)) if is_indexed else IndexChange(("color",))
        self.operate(self.rig.broker.operator.set_topic(topic, index=change), pick if dies else None)

    @rule()
    def build_indexes(self) -> None:
        """Add the rows of earlier messages to all indexes."""
        self.run(self.rig.broker.index_builds.build())

    def operate(self, work: Coroutine[object, object, _T], breaks_at: int | None) -> _T | None:
        """Do what an operator orders; or let the process die in one of its first commits, and start it again."""
        if breaks_at is not None:
            self.engine.break_at(list(Break)[breaks_at % len(Break)], commits_before=breaks_at // 3 % 8)
        told: _T | None = None
        try:
            told = self.run(work)
        except (BrokerError, StoreError):
            if self.rig.store.failure is None:
                raise
        if breaks_at is not None:
            note(f"broke: {self.rig.store.failure}")
            self.begin_again(End.KILL)
        return told

    def count(self, kind: EventKind) -> int:
        """How many events of a kind there are."""
        return sum(event.kind is kind for _, event in read_outbox(self.rig.store))

    # -- ends of a run ------------------------------------------------------------------------------------------------

    def begin_again(self, end: End, down_ms: int = 0) -> None:
        """The run ends, and another one begins; what operators ordered goes on."""
        self.run(self.rig.restart(end, down_ms=down_ms))
        self.now_s += down_ms / 1_000
        self.run(self.after_start())

    async def after_start(self) -> None:
        """Wait for what was ordered in earlier runs."""
        await until(lambda: not self.rig.broker.names.removing)
        procedures = self.rig.broker.procedures
        await until(lambda: not procedures._waiting)
        await self.jobs_end()

    @precondition(lambda self: self.backup is None)
    @rule()
    def back_up(self) -> None:
        """Copy the store, as ``dmq store backup`` does."""
        self.settle()
        self.backup = (self.rig.back_up(), copy.deepcopy(self.books))

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore(self) -> None:
        """Go on with the copy: what came behind it is forgotten, but for the handles that clients have."""
        assert self.backup is not None
        where, books = self.backup
        books.stepped_at_s = self.books.stepped_at_s  # the host's clock is no part of a backup
        self.run(self.rig.restore(where))
        self.backup, self.books = None, books
        self.stores += 1
        self.run(self.after_start())
        self.settle()


def _message_group(message_id: str) -> str:
    number = message_id.removeprefix("m-")
    return "group" if number.isdecimal() and not int(number) % 3 else ""


def _topic_id_in(handle: str) -> int:
    return int.from_bytes(bytes.fromhex(handle)[5:9], "big")
