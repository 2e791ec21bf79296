"""Own keys against one dictionary: sends that replace and keep, repeats, changes, ends of runs, pauses, clock steps.

After every step the rows say what the dictionary says; whatever was accepted comes once, or was replaced or recalled.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.effort import EFFORT
from support.forges.messages.own_keys import keyed, waiting_under_keys
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, End

from broker_adapter.contracts.message import SendReceipt, pack_id, unpack_id
from dmq.broker.delayed.changes import Changed, ChangeOutcome, Meant
from dmq.broker.topics.settings import FlowChange
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import decode_queued
from dmq.store.store import StoreOptions
from dmq.trail.events import EventKind, gap_event

pytestmark = pytest.mark.property
_T = TypeVar("_T")
_KEYS = ("one", "two")


class Send(NamedTuple):
    """A message: 0 is a new one, others repeat an earlier send. ``after_ms`` 0: it is not delayed."""

    back: int
    key: str
    after_ms: int
    keeps: bool


_keys = st.sampled_from(_KEYS)
_sends = st.lists(
    st.builds(Send, st.sampled_from((0, 0, 0, 1, 2, 7)), _keys, st.sampled_from((0, 1, 900, 5_000)), st.booleans()),
    min_size=1,
    max_size=5,
)
_changes = st.sampled_from(("cancel", "fire", "reschedule"))
_OUTCOMES = {
    "recalled": ChangeOutcome.CANCELLED,
    "came": ChangeOutcome.TOO_LATE,
    "replaced": ChangeOutcome.REPLACED,
}  # by fate


class OwnKeys(RuleBasedStateMachine):
    """One topic on a store, and what waits under two keys."""

    on_disk: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="dmq-keys-")
        options = StoreOptions(idempotency_window_ms=10**12, gap_event=gap_event)
        self.rig = EmbeddedRig(Path(self.folder.name), on_disk=self.on_disk, queues=1, options=options)
        self.clock = self.rig.clock
        self.waiting: dict[str, str] = {}  # id by key
        self.last: dict[str, str] = {}  # by key, the id of the message that holds it or held it last
        self.due: dict[str, int] = {}
        self.sent: list[tuple[str, Send]] = []  # each id as it was sent first
        self.answers: dict[str, SendReceipt] = {}
        self.fate: dict[str, str] = {}  # of every id that is not waiting
        self.is_paused = False

    @initialize()
    def open(self) -> None:
        self.run(self.rig.open())
        self.run(self.rig.broker.route(TOPIC))

    def run(self, work: Coroutine[object, object, _T]) -> _T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.pause(False)
        for _ in range(200):
            if not self.waiting:
                break
            self.pass_time(max(500, min(self.due[each] for each in self.waiting.values()) - self.clock.now_ms()))
        assert not self.waiting
        assert not self.rig.store.pending()
        told = [each.event.kind for each in read_outbox(self.rig.store)]
        for kind, fate in ((EventKind.REPLACED, "replaced"), (EventKind.ABSORBED, "absorbed")):
            assert told.count(kind) == list(self.fate.values()).count(fate)
        self.run(self.rig.close())
        assert not self.rig.failures
        self.loop.close()
        self.folder.cleanup()

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(sends=_sends, together=st.booleans())
    def send(self, sends: Sequence[Send], together: bool) -> None:
        """In one call, or in calls side by side that one batch takes."""
        made = [self.made(each) for each in sends]
        now_ms = self.clock.now_ms()
        envelopes = [
            keyed(name, now_ms + each.after_ms if each.after_ms else 0, key=each.key, keeps=each.keeps)
            for name, each in made
        ]
        if together:
            receipts = self.run(self.sent_together(envelopes))
        else:
            receipts = [each[0] for each in self.run(self.sent_side_by_side(envelopes))]
        for (name, each), receipt in zip(made, receipts, strict=True):
            self.accepted(name, each, receipt, now_ms)

    async def sent_together(self, envelopes: Sequence[object]) -> Sequence[SendReceipt]:
        return await self.rig.broker.send(envelopes)  # type: ignore[arg-type]

    async def sent_side_by_side(self, envelopes: Sequence[object]) -> Sequence[Sequence[SendReceipt]]:
        return await asyncio.gather(*(self.sent_together([each]) for each in envelopes))

    def made(self, send: Send) -> tuple[str, Send]:
        if send.back and len(self.sent) >= send.back:
            return self.sent[-send.back]
        self.sent.append((f"m-{len(self.sent)}", send))
        return self.sent[-1]

    def accepted(self, name: str, send: Send, receipt: SendReceipt, now_ms: int) -> None:
        if (first := self.answers.get(name)) is not None:
            assert receipt.repeated
            if self.fate.get(name) == "recalled":
                assert receipt.recalled_at_ms
            else:
                assert (receipt.message_id, receipt.recall_handle) == (first.message_id, first.recall_handle)
            return
        assert not receipt.repeated
        self.answers[name] = receipt
        before = self.waiting.get(send.key)
        if before is not None and send.keeps:
            assert receipt.message_id == before
            self.fate[name] = "absorbed"
            return
        assert receipt.message_id == name
        if before is not None:
            self.fate[before] = "replaced"
            del self.waiting[send.key]
        if send.after_ms:
            assert receipt.queue_offset < 0
            self.waiting[send.key], self.due[name] = name, now_ms + send.after_ms
            self.last[send.key] = name
        else:
            assert receipt.queue_offset >= 0
            self.fate[name] = "came"

    @rule(key=_keys, what=_changes, by_key=st.booleans(), race=st.booleans())
    def change(self, key: str, what: str, by_key: bool, race: bool) -> None:
        """By the key, or by the id of what waits; in a race with a message that replaces it."""
        delayed, later_ms = self.rig.broker.delayed, self.clock.now_ms() + 3_000

        async def change(meant: Sequence[Meant]) -> Sequence[Changed]:
            if what == "cancel":
                return await delayed.cancel(TOPIC, meant)
            if what == "fire":
                return await delayed.fire(TOPIC, meant)
            return await delayed.reschedule(TOPIC, meant, later_ms)

        async def asked() -> tuple[str, ChangeOutcome]:
            if by_key:
                ((packed, (outcome, _)),) = await delayed.by_key(TOPIC, [key], change)
                return unpack_id(packed) if packed else "", outcome
            ((outcome, _),) = await change([Meant(pack_id(before))])
            return before, outcome

        before, last = self.waiting.get(key, ""), self.last_end(key)
        if not before and not by_key:
            return
        wanted = Send(0, key, 900, keeps=False)

        async def both() -> tuple[str, ChangeOutcome]:
            asking = asyncio.ensure_future(asked())
            name, _ = self.made(wanted)
            (receipt,) = await self.sent_together([keyed(name, self.clock.now_ms() + 900, key=key)])
            (found, outcome) = await asking
            if found == before and outcome is ChangeOutcome.DONE and before:  # it was quicker, and then replaced
                self.changed(key, what, before, later_ms)
            self.accepted(name, wanted, receipt, self.clock.now_ms())
            if found == name and outcome is ChangeOutcome.DONE:
                self.changed(key, what, name, later_ms)
            assert outcome in {ChangeOutcome.DONE, ChangeOutcome.REPLACED} or (
                by_key and not before and (found, outcome) == last
            )
            return found, outcome

        found, outcome = self.run(both() if race else asked())
        if not race:
            assert (found, outcome) == ((before, ChangeOutcome.DONE) if before else last)
            if before:
                self.changed(key, what, before, later_ms)

    def last_end(self, key: str) -> tuple[str, ChangeOutcome]:
        """Return the answer to a change by a key that is free."""
        name = self.last.get(key)
        if name is None or key in self.waiting:
            return "", ChangeOutcome.UNKNOWN
        return name, _OUTCOMES[self.fate[name]]

    def changed(self, key: str, what: str, name: str, later_ms: int) -> None:
        if what == "cancel":
            self.fate[name] = "recalled"
            del self.waiting[key]
        else:
            self.due[name] = later_ms if what == "reschedule" else min(self.due[name], self.clock.now_ms())

    @rule(ms=st.sampled_from((1, 30, 900, 6_000)))
    def pass_time(self, ms: int) -> None:
        """Let the scheduler do what is due."""
        self.clock.advance(ms)
        self.run(self.rig.settle())
        came = self.came()
        for key, name in list(self.waiting.items()):
            if name in came:
                assert self.due[name] <= self.clock.now_ms()
                assert not self.is_paused
                self.fate[name] = "came"
                del self.waiting[key]
            else:  # but for a fired one, which may lie a moment behind the reader
                assert self.due[name] > self.clock.now_ms() - 2 or self.is_paused or self.rig.store.held()
        assert sorted(came) == sorted(name for name, fate in self.fate.items() if fate == "came")

    def came(self) -> list[str]:
        topic_id = self.rig.broker.names.topics[TOPIC].topic_id
        start, stop = pack_queue_key(topic_id, 0, 0), pack_queue_key(topic_id, 1, 0)
        rows = self.rig.store.scan(Family.QUEUE, start, stop, limit=100_000).rows
        return [unpack_id(decode_queued(value).message_id) for _, value in rows]

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        """Or resume."""
        self.is_paused = is_paused
        self.run(self.rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=is_paused)))

    @rule(end=st.sampled_from((End.CLOSE, End.KILL)), down_ms=st.sampled_from((0, 2_000)))
    def end(self, end: End, down_ms: int) -> None:
        """The run ends, and another one begins."""
        self.run(self.rig.restart(end, down_ms=down_ms))

    @rule(by_ms=st.sampled_from((-4_000, -50, 50)))
    def step(self, by_ms: int) -> None:
        """The wall clock is set."""
        self.clock.step_to(self.clock.now_ms() + by_ms)

    @invariant()
    def rows_are_right(self) -> None:
        if hasattr(self.rig, "store"):
            assert waiting_under_keys(self.rig.store) == self.waiting


class OnDisk(OwnKeys):
    """The same on RocksDB."""

    on_disk = True


TestInMemory = OwnKeys.TestCase
TestInMemory.settings = settings(max_examples=25 * EFFORT, stateful_step_count=30)
TestOnRocksDB = OnDisk.TestCase
TestOnRocksDB.settings = settings(max_examples=5 * EFFORT, stateful_step_count=20)
