"""Redrives and purges against a small model, through commits that break anywhere, kills and power losses.

Each example is one history: letters of every kind, some with an outcome already, and one job, whose run ends again and
again at a commit that hypothesis picked; then it is left alone. What has to be there at the end does not depend on
where it broke.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.clients.embedded.failing import change
from support.effort import EFFORT
from support.forges.messages.letters import (
    DEAD,
    PURGE,
    REDRIVE,
    UNDERTAKER,
    Break,
    BreakingRig,
    a_message,
    counts,
    dead_count,
    die,
    finish,
    in_lanes,
    job_now,
    letters,
    only,
    play_history,
    queued,
    set_policy,
    sleeping_moves,
    start,
    told,
    units_of,
)
from support.rigs.broker.rig import GROUP, TOPIC, End, an_envelope, ids, receive, until

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message import Message, unpack_id
from broker_adapter.wire.mapping import decode
from dmq.errors import StoreError
from dmq.store.schema.messages.record import QueuedMessage
from dmq.trail.events import EventKind
from retry.dead_letter import PARENT_MESSAGE_ID, DeadFilter, Job, JobKind, JobState
from retry.policy import Reason

pytestmark = pytest.mark.property
REFUNDS, ELSEWHERE = "refunds", "elsewhere"
WAVE_MS = 1_000
HANDED_OUT_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """How a message dies. ``reason`` is ``None`` for one that somebody sent to the dead-letter queue."""

    topic: str = TOPIC
    reason: Reason | None = Reason.FORWARDED
    key: str = "a"
    wave: int = 0  # in the order of which they die, a second apart
    is_readable: bool = True  # else the payload is not a message
    is_settled: bool = False  # it was purged before the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which letters are meant; ``None`` stands for all."""

    topic: str | None = None
    reason: Reason | None = None
    key: str | None = None
    from_wave: int | None = None
    ids: frozenset[int] | None = None

    def means(self, number: int, letter: Letter) -> bool:
        """Say whether a letter is meant."""
        key = letter.key if letter.is_readable else None
        topic = letter.topic if letter.reason is not None else None
        return (
            self.topic in {None, topic}
            and self.reason in {None, letter.reason}
            and self.key in {None, key}
            and (self.from_wave is None or letter.wave >= self.from_wave)
            and (self.ids is None or number in self.ids)
        )

    def filter(self, began_ms: int) -> DeadFilter:
        """Return it as a job is told."""
        return DeadFilter(
            topics=frozenset({self.topic} if self.topic is not None else ()),
            reasons=frozenset({self.reason} if self.reason is not None else ()),
            keys=frozenset({self.key} if self.key is not None else ()),
            since_ms=began_ms + self.from_wave * WAVE_MS if self.from_wave is not None else 0,
            message_ids=frozenset(_name(number) for number in self.ids or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """How a run ends: in a commit of the job, or after it if the job ends before. ``dies`` is a letter of the next."""

    where: Break
    commits_before: int
    end: End
    dies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One example."""

    letters: Sequence[Letter]
    chosen: Chosen
    kind: JobKind
    to_topic: str
    all_groups: bool
    rate_per_s: float
    rows_per_unit: int
    crashes: Sequence[Crash]


def histories(*ends: End) -> st.SearchStrategy[History]:
    """Everything that can be."""
    some_letters = st.lists(
        st.builds(
            Letter,
            topic=st.sampled_from((TOPIC, REFUNDS)),
            reason=st.sampled_from((Reason.FORWARDED, Reason.FORWARDED, Reason.EXHAUSTED, None)),
            key=st.sampled_from("ab"),
            wave=st.integers(0, 2),
            is_readable=st.sampled_from((True, True, True, False)),
            is_settled=st.sampled_from((False, False, False, True)),
        ),
        min_size=1,
        max_size=10,
    )
    chosen = st.one_of(
        st.just(Chosen()),
        st.builds(Chosen, topic=st.sampled_from((TOPIC, REFUNDS))),
        st.builds(Chosen, reason=st.sampled_from((Reason.FORWARDED, Reason.EXHAUSTED)), key=st.just("a")),
        st.builds(Chosen, from_wave=st.integers(0, 2)),
        st.builds(Chosen, ids=st.frozensets(st.integers(0, 9), min_size=1)),
    )
    crash = st.builds(
        Crash,
        where=st.sampled_from(Break),
        commits_before=st.integers(0, 4),
        end=st.sampled_from(ends),
        dies=st.booleans(),
    )
    return st.builds(
        History,
        letters=some_letters,
        chosen=chosen,
        kind=st.sampled_from(JobKind),
        to_topic=st.sampled_from(("", "", ELSEWHERE)),
        all_groups=st.sampled_from((False, False, True)),
        rate_per_s=st.sampled_from((0, 0.5, 20, 1_000)),
        rows_per_unit=st.sampled_from((1, 2, 3, 128)),
        crashes=st.lists(crash, min_size=1, max_size=5),
    )


class Play:
    """Plays a history on a broker, and checks what is there at its end."""

    def __init__(self, rig: BreakingRig, history: History) -> None:
        self.rig = rig
        self.kind = history.kind
        self.chosen = history.chosen
        self.to_topic = history.to_topic if history.kind is JobKind.REDRIVE else ""
        # Who gets what is redriven: the group, or, empty, everybody.
        self.gets = "" if self.to_topic or history.all_groups else GROUP
        # In the order of their death, which is that of their offsets; a letter's number names it.
        self.letters = [each for wave in range(3) for each in history.letters if each.wave == wave]
        self.began_ms = rig.clock.now_ms()
        self.crashes = history.crashes
        plain = REDRIVE if history.kind is JobKind.REDRIVE else PURGE
        self.job = replace(
            plain,
            filter=self.chosen.filter(self.began_ms),
            to_topic=self.to_topic,
            all_groups=history.all_groups and history.kind is JobKind.REDRIVE,
            rate_per_s=history.rate_per_s,
        )
        self.before: list[QueuedMessage] = []

    async def run(self) -> None:
        """Play all of it."""
        await set_policy(self.rig, 1, 1_000)
        await self.rig.broker.catalog.topic(ELSEWHERE)  # a redrive makes none
        for number, letter in enumerate(self.letters):
            await self._die(number, letter)
        settled = [_name(number) for number, letter in enumerate(self.letters) if letter.is_settled]
        if settled:
            await finish(self.rig, replace(PURGE, filter=only(*settled)))
        self._keep()
        for crash in self.crashes:
            self.rig.engine.break_at(crash.where, commits_before=crash.commits_before)
            await self._go_on()
            await self.rig.restart(crash.end)
            if crash.dies:
                late = Letter(topic=f"late-{len(self.letters)}", wave=2)
                await self._die(len(self.letters), late)
                self.letters.append(late)
                self._keep()
        await self._go_on()
        assert self.rig.store.failure is None
        await self.check()
        await self.rig.restart(End.KILL)
        await self.check()

    async def _die(self, number: int, letter: Letter) -> None:
        rig = self.rig
        await rig.pass_ms(max(0, self.began_ms + letter.wave * WAVE_MS - rig.clock.now_ms()))
        topic = letter.topic if letter.reason is not None else DEAD
        message = a_message(_name(number), topic=topic, body=_name(number).encode(), keys=(letter.key,))
        if not letter.is_readable:
            message = an_envelope(_name(number), topic=topic, payload=b"\xff\xff")
        if letter.reason is None:
            await rig.broker.send([message])
        elif letter.reason is Reason.FORWARDED:
            await die(rig, message)
        else:
            await rig.broker.send([message])
            (delivery,) = await receive(rig, topic=topic, renew_for="client-1")
            await change(rig, delivery)

    def _keep(self) -> None:
        """Remember letters as they lie there; those that the job may have changed were kept before it began."""
        if DEAD in self.rig.broker.names.topics:
            self.before += [record for _, _, record in queued(self.rig, DEAD)][len(self.before) :]

    async def _go_on(self) -> None:
        """Let the job run until it has ended or a commit broke; start it if no start of it was kept."""
        found = self._found()
        if found is None:
            try:
                found = await start(self.rig, self.job)
            except BrokerUnavailable:
                return
        job = found
        await until(lambda: self.rig.store.failure is not None or job_now(self.rig, job).state is not JobState.RUNNING)
        with suppress(StoreError):  # behind it, what the job did last is durable, or it broke
            await self.rig.store.commit_async([])
        event("a run that broke" if self.rig.store.failure is not None else "a run that ended")

    def _found(self) -> Job | None:
        is_first = any(letter.is_settled for letter in self.letters)
        jobs = self.rig.broker.dead_letters.jobs()[: -1 if is_first else None]
        assert len(jobs) <= 1
        return jobs[0] if jobs else None

    # -- what must be there -------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Check everything against what the history says, not against how it went."""
        job = self._found()
        assert job is not None
        assert (job.state, job.next_offset) == (JobState.DONE, job.end_offset)
        assert all(letter.is_settled for letter in self.letters[: job.first_offset])
        meant = {
            number: letter
            for number, letter in enumerate(self.letters[: job.end_offset])
            if not letter.is_settled and self.chosen.means(number, letter)
        }
        done = {number: letter for number, letter in meant.items() if self._is_possible(letter)}
        passed = job.end_offset - job.first_offset - len(meant)
        assert counts(job) == (len(done), passed, len(meant) - len(done))
        children = self._children()
        await self._check_letters(done, children)
        self._check_children(done, children)
        self._check_trail(done)
        settled = {number for number, letter in enumerate(self.letters) if letter.is_settled}
        left = [_name(number) for number in range(len(self.letters)) if number not in settled | done.keys()]
        await self._check_who_gets_them(children)
        assert ids(await receive(self.rig, group=UNDERTAKER, topic=DEAD, batch_max=HANDED_OUT_MAX)) == left
        if DEAD in self.rig.broker.names.topics:
            assert await dead_count(self.rig) == len(left)

    async def _check_who_gets_them(self, children: dict[str, list[tuple[str, Message]]]) -> None:
        """The group, each once at attempt 1; and another group only if the job said so."""
        redriven = {message.message_id for made in children.values() for _, message in made}
        for group in (GROUP, "readers"):
            seen = []
            for topic in {topic for made in children.values() for topic, _ in made}:
                found = await receive(self.rig, group=group, topic=topic, batch_max=HANDED_OUT_MAX)
                seen += [each.message_id for each in found if each.message_id in redriven]
                assert all(each.delivery_attempt == 1 for each in found if each.message_id in redriven)
            assert sorted(seen) == sorted(redriven if group == GROUP or not self.gets else ())

    def _is_possible(self, letter: Letter) -> bool:
        if self.kind is JobKind.PURGE:
            return True
        return letter.is_readable and (letter.reason is not None or bool(self.to_topic))

    def _children(self) -> dict[str, list[tuple[str, Message]]]:
        """What lies in any topic or lane and was not sent by the history, by the id of its parent."""
        sent = {_name(number) for number in range(len(self.letters))}
        found: dict[str, list[tuple[str, Message]]] = {}
        seen: list[str] = []
        for topic in self.rig.broker.names.topics:
            lying = [("", record) for _, _, record in queued(self.rig, topic)]
            for group, record in [*lying, *in_lanes(self.rig, topic)]:
                message_id = unpack_id(record.message_id)
                if topic == DEAD or message_id in sent:
                    assert message_id in sent
                    continue
                message = decode(record.payload)
                assert (message.topic, message.message_id, group) == (topic, message_id, self.gets)
                found.setdefault(message.properties[PARENT_MESSAGE_ID], []).append((topic, message))
                seen.append(message_id)
        assert len(seen) == len(set(seen))
        return found

    async def _check_letters(self, done: dict[int, Letter], children: dict[str, list[tuple[str, Message]]]) -> None:
        now = [record for _, _, record in queued(self.rig, DEAD)] if self.letters else []
        assert len(now) == len(self.before) == len(self.letters)
        for letter in await letters(self.rig, with_outcome=True):
            number = letter.dead.offset
            assert letter.dead.message_id == _name(number)
            outcome = letter.outcome
            if number in done and self.kind is JobKind.PURGE:
                assert outcome is not None
                assert (outcome.what, outcome.note) == ("purged", PURGE.why)
                assert _name(number).encode() not in decode(letter.payload).body
                assert now[number].history == self.before[number].history
                continue
            assert now[number] == self.before[number]
            if number in done:
                ((topic, child),) = children[_name(number)]
                assert outcome is not None
                note = f"{topic} {child.message_id}" + (f" for group {self.gets}" if self.gets else "")
                assert (outcome.what, outcome.note) == ("redriven", note)
            else:
                assert (outcome is not None) == self.letters[number].is_settled

    def _check_children(self, done: dict[int, Letter], children: dict[str, list[tuple[str, Message]]]) -> None:
        redriven = done if self.kind is JobKind.REDRIVE else {}
        assert children.keys() == {_name(number) for number in redriven}
        for number, letter in redriven.items():
            ((topic, child),) = children[_name(number)]
            assert topic == (self.to_topic or letter.topic)
            properties = {"color": "red", PARENT_MESSAGE_ID: _name(number)}
            assert (child.body, child.keys, child.properties) == (_name(number).encode(), (letter.key,), properties)

    def _check_trail(self, done: dict[int, Letter]) -> None:
        settled = [number for number, letter in enumerate(self.letters) if letter.is_settled]
        is_purge = self.kind is JobKind.PURGE
        for kind, numbers in (
            (EventKind.PURGED, settled + (list(done) if is_purge else [])),
            (EventKind.REDRIVEN, [] if is_purge else list(done)),
        ):
            assert sorted(each.time_ms for each in told(self.rig, kind)) == sorted(numbers)
        for_group = list(done) if self.gets and not is_purge else []
        assert sorted(each.time_ms for each in told(self.rig, EventKind.QUEUED_FOR_GROUP)) == sorted(for_group)


def _name(number: int) -> str:
    return f"m-{number:02}"


def check(history: History, *, on_disk: bool) -> None:
    """Play a history on a new broker."""

    async def scenario(rig: BreakingRig) -> None:
        with sleeping_moves(rig.clock), units_of(history.rows_per_unit):
            await Play(rig, history).run()

    play_history(scenario, on_disk=on_disk)


@settings(max_examples=40 * EFFORT)
@given(history=histories(End.KILL, End.POWER_LOSS))
def test_each_letter_has_one_outcome_in_memory(history: History) -> None:
    """Wherever it breaks, and whether or not what was written and not synced is lost."""
    check(history, on_disk=False)


@settings(max_examples=8 * EFFORT)
@given(history=histories(End.KILL))
def test_each_letter_has_one_outcome_on_rocksdb(history: History) -> None:
    """The same where a kill is a copy of the directory of a store that was never closed."""
    check(history, on_disk=True)
