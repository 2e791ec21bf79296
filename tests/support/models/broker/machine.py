"""Rules that every state machine of the embedded broker has: what clients do and what time does, told to both sides."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.models.broker.draws import (
    CLIENT,
    FAILING,
    FIRST_POLICY,
    MESSAGE_GROUP_OF,
    POLICIES,
    SEXTON,
    SEXTONS_POLICY,
    TOPICS,
    Sends,
    a_policy,
    batches,
    durations,
    hows,
    message_id_of,
    pairs,
    picks,
    sends,
    steps,
)
from support.models.broker.model import Choice, Fact, Held, Key, Model, Policy, check_taken
from support.models.broker.trail import read_facts, read_lines
from support.rigs.broker.rig import EmbeddedRig, an_envelope, receive

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt, pack_id
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, dead_letter_topic
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.broker.delayed.changes import Changed, ChangeOutcome, Meant
from dmq.broker.topics import IndexChange
from dmq.store.store import StoreOptions
from dmq.trail.events import gap_event

_T = TypeVar("_T")
LOOK_EACH_MS = 14_000  # less than the time after which a process stood still


class Lost(NamedTuple):
    """A handle that is good for nothing: refused while its run lasts, or for ever; else it only changes nothing."""

    group: str
    topic: str
    handle: str
    is_refused: bool


class BrokerRules(RuleBasedStateMachine):
    """One history, without its ends."""

    on_disk: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(MESSAGE_GROUP_OF, {**dict.fromkeys(FAILING, FIRST_POLICY), SEXTON: SEXTONS_POLICY})
        self.loop = asyncio.new_event_loop()
        self.strays: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.strays.append(repr(context)))
        self.folder = tempfile.TemporaryDirectory(prefix="dmq-machine-")
        options = StoreOptions(idempotency_window_ms=10**12, gap_event=gap_event)
        self.rig = EmbeddedRig(Path(self.folder.name), on_disk=self.on_disk, queues=2, options=options)
        self.clock = self.rig.clock
        self.lines: dict[str, dict[str, list[Key]]] = {}
        self.recall_handles: dict[Key, str] = {}

    @initialize()
    def open(self) -> None:
        """Make all names, so that the model need not know when they come into being."""
        self.run(self.rig.open())
        topics = (*TOPICS, *(dead_letter_topic(group) for group in FAILING))
        broker = self.rig.broker

        async def make() -> None:  # together: each alone would wait for the disk
            await asyncio.gather(*(broker.route(topic) for topic in topics))
            policies = self.model.policies.items()
            await asyncio.gather(*(broker.set_group(group, policy=a_policy(policy)) for group, policy in policies))

        self.run(make())
        for topic in TOPICS:
            self.index(topic)
        self.settle()

    def run(self, work: Coroutine[object, object, _T]) -> _T:
        """Run a coroutine on the machine's loop."""
        return self.loop.run_until_complete(work)

    async def send_all(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        """Send in one call, on the loop."""
        return await self.rig.broker.send(envelopes)

    # -- producers ----------------------------------------------------------------------------------------------------

    @rule(batch=sends)
    def send(self, batch: Sends) -> None:
        """One call; ids come from a small pool, so many of them are known, some twice in the call."""
        now_ms = self.clock.now_ms()
        envelopes = self.envelopes(batch)
        receipts = self.run(self.send_all(envelopes))
        for envelope, receipt in zip(envelopes, receipts, strict=True):
            key = (envelope.topic, envelope.message_id)
            assert receipt.message_id == envelope.message_id
            assert receipt.repeated == self.model.send(key, envelope.deliver_at_ms, now_ms)
            assert receipt.recalled_at_ms == self.model.recalled.get(key, 0)
            assert (receipt.queue_offset < 0) == (key in self.model.waiting or key in self.model.recalled)
            if receipt.recall_handle:
                assert self.recall_handles.setdefault(key, receipt.recall_handle) == receipt.recall_handle
        if any(at_ms <= now_ms for at_ms in self.model.waiting.values()):
            self.advance(1)  # of a message group, and overdue: it goes by the timeline, behind the reader

    def envelopes(self, batch: Sends) -> list[Envelope]:
        """What is sent; its number says which message group it has."""
        now_ms = self.clock.now_ms()
        return [
            an_envelope(
                message_id_of(topic, number),
                topic=topic,
                deliver_at_ms=0 if delay is None else now_ms + delay,
                message_group=MESSAGE_GROUP_OF[message_id_of(topic, number)],
                payload=wire.Message(user_properties={"color": str(number % 3)}).SerializeToString(),
            )
            for topic, number, delay in batch
        ]

    @rule(topic=st.sampled_from(TOPICS))
    def index(self, topic: str) -> None:
        """Index a property of a topic, or remove its index."""
        is_indexed = bool(self.rig.broker.names.topics[topic].index_properties)
        change = IndexChange((), ("color",)) if is_indexed else IndexChange(("color",))
        self.run(self.rig.broker.operator.set_topic(topic, index=change))

    @precondition(lambda self: self.recall_handles)
    @rule(pick=picks)
    def recall(self, pick: int) -> None:
        """What waits is gone; what was recalled stays so; what was delivered is said to be."""
        found = sorted(self.model.waiting.keys() & self.recall_handles.keys()) or sorted(self.recall_handles)
        key = found[pick % len(found)] if pick % 4 else sorted(self.recall_handles)[pick % len(self.recall_handles)]
        work = self.rig.broker.recall(key[0], self.recall_handles[key])
        if key in self.model.queued:
            with pytest.raises(Refused, match="delivered at") as refused:
                self.run(work)
            assert refused.value.rule is Rule.NOT_FOUND
            return
        is_repeated = key in self.model.recalled
        if not is_repeated:
            self.model.recall(key, self.clock.now_ms())
        assert self.run(work) == (key[1], self.model.recalled[key], is_repeated)

    @precondition(lambda self: self.recall_handles)
    @rule(pick=picks, ms=st.sampled_from((-1_000, 0, 1, 20, 1_500, 61_000)))
    def reschedule(self, pick: int, ms: int) -> None:
        """What waits comes at its new time, under its old handle; of all else is said what became of it."""
        found = sorted(self.model.waiting.keys() & self.recall_handles.keys()) or sorted(self.recall_handles)
        key = found[pick % len(found)] if pick % 4 else sorted(self.recall_handles)[pick % len(self.recall_handles)]
        now_ms, reader_ms = self.clock.now_ms(), self.rig.store.marks.low() >> 64
        ((outcome, at_ms),) = self.run(self.rescheduling(key, now_ms + ms, by_handle=bool(pick % 2)))
        if key in self.model.waiting:
            assert (outcome, at_ms) == (ChangeOutcome.DONE, self.model.reschedule(key, now_ms + ms, now_ms))
        elif key in self.model.recalled:
            assert (outcome, at_ms) == (ChangeOutcome.CANCELLED, self.model.recalled[key])
        else:
            assert outcome is ChangeOutcome.TOO_LATE
        if ms <= 0 or now_ms + ms == reader_ms:  # the latter where the clock was set back a little
            self.advance(max(0, ms) + 3)  # behind the reader, not within its millisecond, and not where it was

    def rescheduling(self, key: Key, at_ms: int, *, by_handle: bool) -> Coroutine[object, object, list[Changed]]:
        """The call."""
        meant = Meant(pack_id(key[1]))
        if by_handle:
            meant = self.rig.broker.recalls.meant(key[0], self.recall_handles[key])
        return self.rig.broker.delayed.reschedule(key[0], [meant], at_ms)

    # -- time ---------------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from(steps))
    def advance(self, ms: int) -> None:
        """Time passes, in which the process runs."""
        self.pass_time(ms)
        self.settle()

    @rule(ms=st.sampled_from((16_000, 61_000, 600_000)))
    def stand_still(self, ms: int) -> None:
        """Time passes, in which the process is stopped; no client falls silent of it."""
        self.clock.advance(ms)
        self.settle()

    def pass_time(self, ms: int) -> None:
        """Let the clock go on, and both sides look who is alive as often as a process does that runs."""
        while ms > 0:
            self.clock.advance(min(ms, LOOK_EACH_MS))
            ms -= LOOK_EACH_MS
            self.rig.broker.lease_ends.clients.look()
            self.model.look(self.clock.monotonic_s())

    @rule(ms=st.sampled_from(steps), is_forward=st.booleans())
    def step(self, ms: int, *, is_forward: bool) -> None:
        """The host's clock is set, forward or back, while no time passes."""
        by_ms = ms if is_forward else -ms
        before = self.rig.store.clock.status().steps
        self.clock.step_to(self.clock.now_ms() + by_ms)
        seen = self.rig.store.clock.status()  # several steps within a second are noticed as one, or not at all
        noticed_ms = seen.last_step_ms if seen.steps > before else 0
        self.model.stepped(by_ms, noticed_ms, self.clock.now_ms())
        self.settle()

    @precondition(lambda self: self.times())
    @rule(pick=picks, early_ms=st.sampled_from((0, 1)))
    def advance_to_a_time(self, pick: int, early_ms: int) -> None:
        """When something is due, or a lease ends: to the millisecond, or one before it."""
        times = self.times()
        self.pass_time(times[pick % len(times)] - early_ms - self.clock.now_ms())
        self.settle()

    def settle(self) -> None:
        """Let time do its work, on both sides."""
        self.run(self.rig.settle())
        self.model.settle(self.clock.now_ms(), self.clock.monotonic_s())

    # -- consumers ----------------------------------------------------------------------------------------------------

    @rule(pair=pairs, batch_max=batches, invisible_ms=durations, is_push=st.booleans())
    def receive(self, pair: tuple[str, str], batch_max: int, invisible_ms: int, *, is_push: bool) -> None:
        """What comes is held until something is done with it."""
        self.take(pair, batch_max, invisible_ms, is_push=is_push)

    def take(self, pair: tuple[str, str], batch_max: int, invisible_ms: int, *, is_push: bool = False) -> list[Key]:
        """Exactly what is visible may come, as many as fit, each with its attempt; message groups in order."""
        group, topic = pair
        now_ms = self.clock.now_ms()
        choice = self.model.choice(group, topic, self.look_at(topic), is_push=is_push)
        deliveries = self.run(
            receive(
                self.rig,
                group=group,
                topic=topic,
                batch_max=batch_max,
                invisible_ms=invisible_ms,
                renew_for=CLIENT if is_push else "",
            )
        )
        taken = [(topic, each.message_id) for each in deliveries]
        check_taken(choice, taken, batch_max)
        for key, each in zip(taken, deliveries, strict=True):
            held = self.model.held[group][key]
            self.check_delivery(group, held, each)
            self.model.hand_out(held, each.receipt_handle, now_ms, invisible_ms, is_push=is_push)
        if choice.condemned:
            self.bury_the_condemned(group, choice)
        return taken

    @rule(
        pair=pairs, hows=st.lists(hows, min_size=1, max_size=4), is_push=st.booleans(), then_ms=st.sampled_from(steps)
    )
    def consume(self, pair: tuple[str, str], hows: list[str], then_ms: int, *, is_push: bool) -> None:
        """A consumer that takes all there is, and finishes or fails it; then time passes, so that it fails again."""
        for at, key in enumerate(self.take(pair, 1_000, 30_000, is_push=is_push)):
            held, how = self.model.held[pair[0]][key], hows[at % len(hows)]
            if held.hidden_until_ms is not None and not held.is_finished:
                self.finish(how, pair[0], key, held.handles[-1].text)
        self.advance(then_ms)

    def finish(self, how: str, group: str, key: Key, handle: str) -> None:
        """Do one thing with a delivery, on both sides."""
        broker, now_ms = self.rig.broker, self.clock.now_ms()
        if how == "ack":
            assert list(self.run(broker.ack(group, key[0], [handle]))) == [None]
            self.model.ack(group, key)
        elif how == "fail":
            self.run(broker.change_invisible(group, key[0], handle, 1))
            self.model.hide(group, key, now_ms, 1, suspend=False)
        elif how == "give up":
            self.run(broker.dead_letter(group, key[0], handle, attempts=2))
            self.model.give_up(group, key, now_ms, 2)
        elif how == "send back":
            self.run(broker.send_back(group, key[0], handle, 0))
            self.model.send_back(group, key, now_ms, 0)

    def check_delivery(self, group: str, held: Held, delivery: Delivery) -> None:
        """Its attempt is the next one, which its policy allows; a dead letter tells how it died."""
        assert delivery.delivery_attempt == held.next_attempt <= self.model.policies[group].max_attempts
        assert delivery.dead_letter == self.model.letters.get((delivery.topic, delivery.message_id))

    def bury_the_condemned(self, group: str, choice: Choice) -> None:
        """What a receive came by that has no attempt left is dead now; which it came by, the trail says."""
        self.settle()
        for fact in self.untold():
            held = choice.condemned[fact.key]
            assert fact.group == group
            self.model.bury(group, fact.key, self.clock.now_ms(), "exhausted", held.next_attempt - 1)
        assert not self.untold()

    def untold(self) -> list[Fact]:
        """What the trail holds and the model does not."""
        return list((Counter(read_facts(self.rig.broker)) - Counter(self.model.facts)).elements())

    @precondition(lambda self: self.acknowledgeable())
    @rule(pick=picks, count=st.integers(1, 4))
    def ack(self, pick: int, count: int) -> None:
        """With the last handle of messages that are leased, or expired, or acknowledged already."""
        found = self.acknowledgeable()
        group, key, _ = found[pick % len(found)]
        chosen = [(other, held) for where, other, held in found if where == group and other[0] == key[0]][-count:]
        handles = [held.handles[-1].text for _, held in chosen]
        assert list(self.run(self.rig.broker.ack(group, key[0], handles))) == [None] * len(handles)
        for other, _ in chosen:
            self.model.ack(group, other)

    @precondition(lambda self: self.lost())
    @rule(pick=picks)
    def use_a_lost_handle(self, pick: int) -> None:
        """Nothing changes."""
        lost = self.lost()
        group, topic, handle, is_refused = lost[pick % len(lost)]
        (result,) = self.run(self.rig.broker.ack(group, topic, [handle]))
        assert isinstance(result, Refused) == is_refused
        broker = self.rig.broker
        for work in (
            broker.change_invisible(group, topic, handle, 1_000),
            broker.dead_letter(group, topic, handle, attempts=1),
            broker.send_back(group, topic, handle, 0),
        ):
            with pytest.raises(Refused) as refused:
                self.run(work)
            assert refused.value.rule is Rule.RECEIPT_HANDLE

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, invisible_ms=st.sampled_from((0, 1, 1_000, 61_000)), suspend=st.booleans())
    def change_invisible(self, pick: int, invisible_ms: int, *, suspend: bool) -> None:
        """With the last handle, leased or expired; of a push consumer it means, without ``suspend``, that it failed."""
        group, key, handle = self.one(pick)
        work = self.rig.broker.change_invisible(group, key[0], handle, invisible_ms, suspend=suspend)
        assert self.run(work) == handle
        self.model.hide(group, key, self.clock.now_ms(), invisible_ms, suspend=suspend)

    @precondition(lambda self: self.unfinished(is_push=True))
    @rule(pick=picks, invisible_ms=st.sampled_from((0, 500, 2_000)))
    def nack(self, pick: int, invisible_ms: int) -> None:
        """A push consumer fails."""
        group, key, handle = self.one(pick, is_push=True)
        self.run(self.rig.broker.change_invisible(group, key[0], handle, invisible_ms))
        self.model.hide(group, key, self.clock.now_ms(), invisible_ms, suspend=False)

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, attempts=st.integers(0, 4))
    def give_up(self, pick: int, attempts: int) -> None:
        """A consumer forwards to the dead-letter queue."""
        group, key, handle = self.one(pick)
        self.run(self.rig.broker.dead_letter(group, key[0], handle, attempts=attempts))
        self.model.give_up(group, key, self.clock.now_ms(), attempts)

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, level=st.sampled_from((-1, 0, 0, 1, 3)))
    def send_back(self, pick: int, level: int) -> None:
        """With a delay level."""
        group, key, handle = self.one(pick)
        self.run(self.rig.broker.send_back(group, key[0], handle, level))
        self.model.send_back(group, key, self.clock.now_ms(), level)

    @rule(is_seen=st.booleans())
    def hear_of_the_client(self, *, is_seen: bool) -> None:
        """The push consumer gives a sign of life, or leaves."""
        if is_seen:
            self.rig.broker.client_seen(CLIENT)
            self.model.client_seen()
        else:
            self.rig.broker.client_gone(CLIENT)
            self.model.client_gone(self.clock.now_ms())

    @rule(group=st.sampled_from(FAILING), policy=st.sampled_from(POLICIES))
    def set_policy(self, group: str, policy: Policy) -> None:
        """It counts at once, also for what waits."""
        self.run(self.rig.broker.set_group(group, policy=a_policy(policy)))
        self.model.policies[group] = policy

    # -- what there is to choose from ---------------------------------------------------------------------------------

    def all_held(self) -> list[tuple[str, Key, Held]]:
        """Every message of every group that looked for it."""
        return [(group, key, held) for group, messages in self.model.held.items() for key, held in messages.items()]

    def leases(self) -> list[Held]:
        """What is hidden now."""
        return [held for _, _, held in self.all_held() if held.hidden_until_ms is not None]

    def due(self) -> list[int]:
        """When something on the timeline is due."""
        retries = [held.retry_at_ms for _, _, held in self.all_held() if held.retry_at_ms is not None]
        return sorted([*self.model.waiting.values(), *retries])

    def times(self) -> list[int]:
        """When something will happen by itself."""
        return self.due() + sorted(held.hidden_until_ms or 0 for held in self.leases())

    def unfinished(self, *, is_push: bool = False) -> list[tuple[str, Key, Held]]:
        """What was handed out and neither acknowledged nor failed; of a push consumer, if only those are asked for."""
        return [each for each in self.all_held() if self.is_good(each[2]) and (each[2].is_push or not is_push)]

    @staticmethod
    def is_good(held: Held) -> bool:
        """Whether its last handle decides what becomes of it."""
        return held.has_good_handle and not held.is_finished

    def one(self, pick: int, *, is_push: bool = False) -> tuple[str, Key, str]:
        """One of those: group, message, handle."""
        found = self.unfinished(is_push=is_push)
        group, key, held = found[pick % len(found)]
        return group, key, held.handles[-1].text

    def acknowledgeable(self) -> list[tuple[str, Key, Held]]:
        """What an acknowledgement is answered OK for."""
        return [each for each in self.all_held() if each[2].has_good_handle]

    def lost(self) -> list[Lost]:
        """Handles that were superseded in this run, or given away whenever."""
        found = []
        for group, (topic, _), held in self.all_held():
            if held.is_acked or not held.handles:
                continue
            for handle in held.handles[:-1] if held.has_good_handle else held.handles:
                left = held.left_in_run.get(handle.place)
                if left is not None:
                    found.append(Lost(group, topic, handle.text, left == self.model.run))
                elif held.run == self.model.run or held.is_spent:  # else no run knows that there was a later one
                    found.append(Lost(group, topic, handle.text, is_refused=True))
        return found

    # -- order --------------------------------------------------------------------------------------------

    def look_at(self, topic: str) -> dict[str, list[Key]]:
        """Return the message groups of a topic as they lie in its queues: in the promised order, and never changed."""
        lines = read_lines(self.rig.broker, topic)
        for message_group, line in self.lines.get(topic, {}).items():
            assert lines[message_group][: len(line)] == line
        for message_group, line in lines.items():
            assert set(line) == {
                key for key in self.model.queued if key[0] == topic and MESSAGE_GROUP_OF[key[1]] == message_group
            }
            if not topic.startswith(DEAD_LETTER_PREFIX):
                in_time = [key for key in line if key not in self.model.overdue]
                assert in_time == self.model.order(topic, message_group)
        self.lines[topic] = lines
        return lines
