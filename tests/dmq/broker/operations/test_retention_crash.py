"""Retention through commits that break anywhere, kills and power losses.

Each example is one history of sends, reads, pulls, time that passes and turns of retention on one queue. What may be
gone at the end, and what must be there, follows from the trail alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.forges.messages.letters import Break, BreakingRig, broke, play_history
from support.models.store.outbox import TrailEvent, read_outbox
from support.rigs.broker.rig import TOPIC, End, ack, ids, receive, send
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.message import unpack_id
from dmq.broker.operations.admin import BEGIN
from dmq.broker.topics.settings import KeepChange
from dmq.store.schema.keys import Family, queue_offset_of
from dmq.trail.events import EventKind

pytestmark = pytest.mark.property
GROUPS = ("workers", "auditors")
KEEP_MS = 1_000


@dataclass(frozen=True, slots=True)
class Step:
    """One call, or time that passes, and how the run ends in it if it does. A number says how many, or how far."""

    what: str  # "send", "read", "take", "commit", "reset", "pass", "turn", "restart"
    number: int
    group: str
    where: Break | None
    end: End


def histories(*ends: End) -> st.SearchStrategy[list[Step]]:
    """Some steps."""
    often = ("send", "read", "pass", "turn", "turn")
    whats = st.sampled_from((*often, "take", "commit", "reset", "restart"))
    breaks = st.one_of(st.none(), st.none(), st.sampled_from(Break))
    step = st.builds(Step, whats, st.integers(1, 4), st.sampled_from(GROUPS), breaks, st.sampled_from(ends))
    return st.lists(step, min_size=3, max_size=25)


class Play:
    """One history on one broker."""

    def __init__(self, rig: BreakingRig, *, keeps_unread: bool) -> None:
        self.rig = rig
        self.keeps_unread = keeps_unread
        self.sent = 0
        self.end = 0  # the highest that was ever seen

    async def run(self, steps: Sequence[Step]) -> None:
        """Play all of it, look, read what is left, and look again."""
        keep = KeepChange(KEEP_MS, unread="yes" if self.keeps_unread else "no")
        await self.rig.broker.operator.create_topic(TOPIC, queues=1, message_type=None, keep=keep)
        for step in steps:
            # A step may write nothing; and a procedure that broke goes on by itself, who knows when.
            is_far = step.what == "reset" or step.where is None
            self.rig.engine.break_at(step.where or Break.AFTER_SYNC, commits_before=10**9 if is_far else 0)
            await broke(self.rig, self._do(step), step.what, step.end)
            self._look()
        await self.rig.restart(End.KILL)
        await self._read_all()

    async def _do(self, step: Step) -> None:
        rig = self.rig
        match step.what:
            case "send":
                self.sent += step.number
                await send(rig, *(f"m-{number}" for number in range(self.sent - step.number, self.sent)))
            case "read" | "take":
                found = await receive(rig, group=step.group, batch_max=step.number, invisible_ms=2 * KEEP_MS)
                if step.what == "read":
                    await ack(rig, *found, group=step.group)
            case "commit":
                begin, end = await rig.broker.pulls.queue_range(TOPIC, 0)
                await rig.broker.pulls.commit_offset(f"puller-of-{step.group}", TOPIC, 0, min(begin + step.number, end))
            case "reset" if any(each.event.kind is EventKind.SUBSCRIBED for each in self._trail(step.group)):
                await rig.broker.operator.reset_group(step.group, TOPIC, BEGIN)
            case "pass":
                await rig.pass_ms(step.number * KEEP_MS // 2)
            case "turn":
                await rig.broker.retention.turn()
            case "restart":
                await rig.restart(End.CLOSE)

    def _trail(self, group: str = "") -> list[TrailEvent]:
        known = self.rig.broker.names.groups.get(group)
        group_id = known.group_id if known is not None else -1
        return [each for each in read_outbox(self.rig.store) if not group or each.event.group_id == group_id]

    def _look(self) -> None:
        """Check the rows against the begin, and everything that is gone against the trail."""
        rig = self.rig
        topic_id = rig.broker.names.topics[TOPIC].topic_id
        begin, end = rig.store.queue_begin(topic_id, 0), rig.store.queue_end(topic_id, 0)
        assert [queue_offset_of(key) for key, _ in all_rows(rig.store, Family.QUEUE)] == list(range(begin, end))
        assert end >= self.end or rig.store.failure is not None
        queued: list[bytes] = []
        acked: dict[int, set[int]] = {}
        first: dict[int, int] = {}
        pullers: set[int] = set()
        expired: set[int] = set()
        for record, told in self._trail():
            offset = record.queue_offset
            match told.kind:
                case EventKind.QUEUED:
                    assert offset == len(queued)  # no offset is used twice
                    queued.append(told.message_id)
                case EventKind.SUBSCRIBED:
                    first[told.group_id] = offset
                case EventKind.ACKED | EventKind.FILTERED:
                    acked.setdefault(told.group_id, set()).add(offset)
                case EventKind.OFFSET_SET:
                    pullers.add(told.group_id)
                case EventKind.EXPIRED:
                    assert offset not in expired
                    expired.add(offset)
                    assert told.message_id == queued[offset]
                    assert not self.keeps_unread or not (first or pullers)
                case _:
                    pass
        assert len(queued) == end
        assert expired <= set(range(begin))
        for group_id, offset in first.items():
            assert set(range(offset, begin)) <= acked.get(group_id, set()) | expired
        if not first and not pullers:
            assert expired == set(range(begin))
        self.end = end

    async def _read_all(self) -> None:
        """Both groups get all that is left for them, each message once; then everything goes."""
        rig = self.rig
        queued = {
            each.record.queue_offset: unpack_id(each.event.message_id)
            for each in self._trail()
            if each.event.kind is EventKind.QUEUED
        }
        await rig.pass_ms(10 * KEEP_MS)
        begin, end = await rig.broker.pulls.queue_range(TOPIC, 0)
        for group in GROUPS:
            acked = self._finished(group)
            found = await receive(rig, group=group, batch_max=100)
            assert sorted(ids(found)) == sorted(queued[at] for at in range(begin, end) if at not in acked)
            await ack(rig, *found, group=group)
            await rig.broker.pulls.commit_offset(f"puller-of-{group}", TOPIC, 0, end)
        await rig.broker.retention.turn()
        self._look()
        assert await rig.broker.pulls.queue_range(TOPIC, 0) == (end, end)
        (receipt,) = await send(rig, "last")
        assert receipt.queue_offset == end

    def _finished(self, group: str) -> set[int]:
        """What a group has finished since it was last set back."""
        done: set[int] = set()
        for record, told in self._trail(group) if group in self.rig.broker.names.groups else []:
            if told.kind is EventKind.RESET:
                done = {offset for offset in done if offset < record.queue_offset}
            elif told.kind in {EventKind.ACKED, EventKind.FILTERED}:
                done.add(record.queue_offset)
        return done


def check(history: Sequence[Step], *, on_disk: bool, keeps_unread: bool) -> None:
    """Play a history on a new broker."""
    play_history(lambda rig: Play(rig, keeps_unread=keeps_unread).run(history), on_disk=on_disk)


@settings(max_examples=60 * EFFORT)
@given(history=histories(End.KILL, End.POWER_LOSS), keeps_unread=st.booleans())
def test_retention_loses_nothing_in_memory(history: list[Step], *, keeps_unread: bool) -> None:
    """Wherever it breaks, and whether or not what was written and not synced is lost."""
    check(history, on_disk=False, keeps_unread=keeps_unread)


@settings(max_examples=8 * EFFORT)
@given(history=histories(End.KILL), keeps_unread=st.booleans())
def test_retention_loses_nothing_on_rocksdb(history: list[Step], *, keeps_unread: bool) -> None:
    """The same where a kill is a copy of the directory of a store that was never closed."""
    check(history, on_disk=True, keeps_unread=keeps_unread)
