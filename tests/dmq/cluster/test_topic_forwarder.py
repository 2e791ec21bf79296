"""What leaves for a cluster, on an embedded broker: nothing is left lying, nothing is sent that was given up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs
from support.effort import EFFORT, SEED
from support.forges.messages.letters import finish
from support.rigs.broker.rig import TOPIC, End, an_envelope, play, receive, until
from support.rigs.rocketmq.lanes import LanesRig, with_lanes

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import Envelope
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.broker.topics.registry import FORWARDER_GROUP
from dmq.cluster import topic_forwarder as lane
from dmq.cluster.outgoing import Doubt
from dmq.cluster.topic_forwarder import TOGETHER_MAX
from dmq.trail.events import EventKind
from retry import BreakerState
from retry.dead_letter import PARENT_MESSAGE_ID, REFUSED, Job, JobKind

pytestmark = pytest.mark.contract
NO_ANSWER = BrokerUnavailable("no answer")


@pytest.fixture
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes end after a moment without a message."""
    monkeypatch.setattr(lane, "IDLE_MS", 10)


@pytest.mark.usefixtures("short_idle")
@with_lanes
async def test_messages_after_a_slow_one_continue(rig: LanesRig) -> None:
    """A lane does not end while something of its topic is neither at the cluster nor finished."""
    hold = asyncio.Event()

    async def slow(envelopes: Sequence[Envelope]) -> None:
        await hold.wait()

    rig.cluster.answer = slow
    await rig.keep("first", message_group="g")
    await rig.cluster.until(lambda: rig.cluster.calls)
    await rig.keep("second", "third", message_group="g")
    for _ in range(5):  # longer than a lane is idle
        rig.clock.advance(1_000)
        await asyncio.sleep(0.02)
    hold.set()
    await rig.forwarded("first", "second", "third")
    assert rig.cluster.taken == ["first", "second", "third"]


@with_lanes
async def test_a_message_given_up_with_its_topic_is_not_sent(rig: LanesRig) -> None:
    """Not when the cluster is back either; the topic does not come back by itself, and one made anew is served."""
    rig.cluster.says(Refused(Rule.FORBIDDEN, "the key may not"))
    await rig.keep(*(f"old-{number}" for number in range(200)))  # more than are in flight at a time
    await rig.cluster.until(lambda: rig.cluster.calls)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    rig.cluster.answer = rig.cluster.ok
    rig.forwarder.try_now()
    lane_of = rig.forwarder.lane(TOPIC)
    await until(lambda: not lane_of.in_flight and lane_of._running is not None and lane_of._running.done())
    assert TOPIC not in rig.broker.names.topics
    assert not lane_of.gate.error
    await rig.keep("new")
    await rig.forwarded("new")
    assert rig.cluster.taken == ["new"]


def is_silent(rig: LanesRig) -> None:
    """Have the cluster keep what it gets, and answer nothing."""

    async def answer(envelopes: Sequence[Envelope]) -> None:
        rig.cluster.taken += [each.message_id for each in envelopes]
        await asyncio.Event().wait()

    rig.cluster.answer = answer


async def looked(rig: LanesRig) -> None:
    """Return once it is known what lay there from before: what comes until then is suspected as well."""
    await until(lambda: not rig.forwarder._to_look_at)


@with_lanes
async def test_after_a_kill_possible_duplicates_are_marked(rig: LanesRig) -> None:
    """Of message groups, whose first ones stand before much that was not sent, and of letters that were sent again."""
    is_silent(rig)
    await rig.keep(*(f"a-{number}" for number in range(100)), message_group="a")
    await rig.keep("b", message_group="b")
    await rig.keep("plain")
    await rig.cluster.until(lambda: {"a-0", "b", "plain"} <= set(rig.cluster.taken))
    before = set(rig.cluster.taken)
    rig.cluster.answer = rig.cluster.ok
    await rig.restart(End.KILL)
    await looked(rig)
    await rig.keep("new")
    await rig.forwarded("a-99", "b", "plain", "new")
    told = rig.told(EventKind.FORWARD_IN_DOUBT)
    assert before <= told.keys()
    assert "new" not in told
    assert len(told) < 100


@with_lanes
async def test_a_message_that_became_due_after_a_kill_is_not_in_doubt(rig: LanesRig) -> None:
    """Messages that were still pending at the kill were never sent, also if the next run finds them overdue."""
    await rig.keep("sent")
    await rig.forwarded("sent")
    ids = [f"m-{number}" for number in range(200)]
    await rig.keep(*ids, deliver_at_ms=rig.clock.now_ms() + 15_000)
    await rig.restart(End.KILL, down_ms=60_000)
    await rig.settle()  # before the forwarder has read what the queues hold
    await rig.forwarded(*ids)
    assert not rig.told(EventKind.FORWARD_IN_DOUBT)


@pytest.mark.parametrize("way", ["unreachable", "no answer"])
def test_a_message_kept_while_the_cluster_was_away_is_not_in_doubt_after_a_kill(way: str, tmp_path: Path) -> None:
    """Only messages whose sending began are in doubt: after one kill and after another, and after a clean stop."""

    async def scenario(rig: LanesRig) -> None:
        await rig.keep("sent")
        await rig.forwarded("sent")
        await keeps_while_away(rig, way, "a")
        tried = {each for call in rig.cluster.calls for each in call}
        await rig.restart(End.KILL)
        await keeps_while_away(rig, way, "b")
        tried |= {each for call in rig.cluster.calls for each in call}
        await rig.restart(End.KILL)
        rig.cluster.answer = rig.cluster.ok
        await rig.forwarded(*(f"{run}-{number}" for run in "ab" for number in range(200)))
        told = rig.told(EventKind.FORWARD_IN_DOUBT).keys()
        assert told <= tried
        rig.cluster.calls.clear()
        await rig.restart(End.CLOSE)
        await keeps_while_away(rig, way, "c")
        tried |= {each for call in rig.cluster.calls for each in call}
        await rig.restart(End.POWER_LOSS)
        rig.cluster.answer = rig.cluster.ok
        await rig.forwarded(*(f"c-{number}" for number in range(200)))
        assert rig.told(EventKind.FORWARD_IN_DOUBT).keys() <= tried

    asyncio.run(play(LanesRig(tmp_path), scenario))


async def keeps_while_away(rig: LanesRig, way: str, run: str) -> None:
    """Keep 200 messages while the cluster takes none, and return once the lane stopped sending, durable."""
    if way == "unreachable":
        rig.forwarder.away()
    else:
        rig.cluster.says(NO_ANSWER)
    lane_of = rig.forwarder.lane(TOPIC)
    await rig.broker.send([an_envelope(f"{run}-{number}") for number in range(6)])  # enough for the breaker to open
    await until(lambda: lane_of.in_flight > 0 and not (lane_of.gate.is_open and rig.forwarder._reach.is_there))
    await rig.keep(*(f"{run}-{number}" for number in range(6, 200)))
    await rig.store.commit_async([])


@with_lanes
async def test_messages_sent_after_an_outage_are_in_doubt_after_a_kill(rig: LanesRig) -> None:
    """A bound that was stored while the cluster was away is raised, durably, before anything beyond it is sent."""
    await keeps_while_away(rig, "unreachable", "a")
    is_silent(rig)
    rig.forwarder.back()
    await rig.cluster.until(lambda: rig.cluster.taken)
    before = set(rig.cluster.taken)
    rig.cluster.answer = rig.cluster.ok
    await rig.restart(End.POWER_LOSS)
    await rig.forwarded(*(f"a-{number}" for number in range(200)))
    assert before <= rig.told(EventKind.FORWARD_IN_DOUBT).keys()


@with_lanes
async def test_a_letter_sent_again_before_a_kill_is_reported(rig: LanesRig) -> None:
    """It lies in a queue of its own, and may be at the cluster as well."""
    rig.cluster.says(Refused(Rule.BODY_SIZE, "too large"))
    await rig.keep("large")
    await until(lambda: rig.forwarder.totals.refused == 1)
    rig.cluster.taken.clear()
    is_silent(rig)
    await finish(rig, Job(job_id=0, kind=JobKind.REDRIVE, group=FORWARDER_GROUP))
    await rig.cluster.until(lambda: rig.cluster.taken)
    (again,) = rig.cluster.taken
    rig.cluster.answer = rig.cluster.ok
    await rig.restart(End.KILL)
    await rig.forwarded(again)
    assert rig.told(EventKind.FORWARD_IN_DOUBT).keys() == {again}


@with_lanes
async def test_an_entry_in_doubt_stays_so_over_a_clean_stop(rig: LanesRig) -> None:
    """After a kill, a run that sent nothing again before it was stopped leaves the telling to the next one."""
    is_silent(rig)
    await rig.keep(*(f"m-{number}" for number in range(8)))
    await rig.cluster.until(lambda: len(rig.cluster.taken) == 8)
    await rig.restart(End.KILL)
    for _ in range(2):
        rig.forwarder._to_look_at.add("never looked at")  # as at a stop right after the start
        await rig.restart(End.CLOSE)
    rig.cluster.answer = rig.cluster.ok
    before = rig.told(EventKind.FORWARD_IN_DOUBT)["m-7"]
    await rig.restart(End.CLOSE)
    await rig.forwarded("m-7")
    assert rig.told(EventKind.FORWARD_IN_DOUBT)["m-7"] > before
    await rig.restart(End.CLOSE)
    assert rig.forwarder._doubt is Doubt.NOTHING


@with_lanes
async def test_a_restored_store_reports_that_the_cluster_may_have_all_of_it(rig: LanesRig) -> None:
    """What was forwarded since the backup is sent again: what lay there, and what was due; not what came later."""
    is_silent(rig)
    now_ms = rig.clock.now_ms()
    await rig.keep(*(f"m-{number}" for number in range(40)))
    await rig.keep("due", deliver_at_ms=now_ms + 1_000)
    await rig.keep("later", deliver_at_ms=now_ms + 60_000)
    backup = rig.back_up()
    rig.clock.advance(2_000)
    rig.cluster.answer = rig.cluster.ok
    await rig.restore(backup)
    await looked(rig)
    await rig.keep("new")
    await rig.settle()
    await rig.pass_ms(60_000)
    await rig.forwarded(*(f"m-{number}" for number in range(40)), "due", "later", "new")
    told = rig.told(EventKind.FORWARD_IN_DOUBT)
    assert told.keys() >= {*(f"m-{number}" for number in range(40)), "due"}
    assert not told.keys() & {"later", "new"}


@with_lanes
async def test_an_unmarked_message_is_in_doubt(rig: LanesRig) -> None:
    """The disk is full until the daemon is stopped: the cluster has it, and gets it again."""

    async def answer(envelopes: Sequence[Envelope]) -> None:
        rig.store.is_disk_full = lambda: True  # type: ignore[method-assign]

    rig.cluster.answer = answer
    await rig.keep("m")
    await rig.cluster.until(lambda: rig.cluster.taken)
    rig.cluster.answer = rig.cluster.ok
    await rig.restart(End.CLOSE)
    await rig.forwarded("m")
    assert rig.cluster.taken == ["m", "m"]
    assert rig.told(EventKind.FORWARD_IN_DOUBT)["m"] == 1


@with_lanes
async def test_while_the_cluster_takes_nothing_little_is_held(rig: LanesRig) -> None:
    """What comes meanwhile stays on the disk, and one message asks whether it is back; all go once it is."""
    rig.cluster.says(NO_ANSWER)
    together = [f"first-{number}" for number in range(6)]
    await rig.broker.send([an_envelope(each) for each in together])
    await rig.cluster.until(lambda: rig.cluster.calls)
    gate = rig.forwarder.lane(TOPIC).gate
    await until(lambda: not gate.is_open)
    later = [f"later-{number}" for number in range(60)]
    await rig.broker.send([an_envelope(each) for each in later])
    assert rig.forwarder.lane(TOPIC).in_flight <= len(together) + TOGETHER_MAX  # what was asked for before it shut
    for probes in range(1, 4):
        rig.forwarder.try_now()
        await rig.cluster.until(lambda: len(rig.cluster.calls) > probes)  # noqa: B023 - waited for at once
        await until(lambda: gate._breaker.state is BreakerState.OPEN)
    assert [len(each) for each in rig.cluster.calls] == [6, 1, 1, 1]
    rig.cluster.answer = rig.cluster.ok
    rig.forwarder.try_now()
    while not {*together, *later} <= rig.told(EventKind.FORWARDED).keys():
        rig.clock.advance(1_000)  # they go slowly at first
        await asyncio.sleep(0.001)
    await until(lambda: not rig.forwarder.totals.held_bytes)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any message in flight be much."""
    monkeypatch.setattr(lane, "HELD_BYTES_MAX", 0)


@pytest.mark.usefixtures("little_room")
@with_lanes
async def test_the_messages_of_all_lanes_are_bounded(rig: LanesRig) -> None:
    """When it is much, each holds one message at a time, and all go."""
    ids = [f"m-{number}" for number in range(20)]
    await rig.broker.send([an_envelope(each) for each in ids])
    await rig.forwarded(*ids)
    assert {len(each) for each in rig.cluster.calls} == {1}


@with_lanes
async def test_labels_of_a_letter_do_not_leave_with_it(rig: LanesRig) -> None:
    """A redrive takes it off; a property that happens to have the name, in a message that was never refused, stays."""
    rig.cluster.says(Refused(Rule.BODY_SIZE, "too large"), "large")
    await rig.keep("large")
    honest = wire.Message(user_properties={REFUSED: "by the customer"}).SerializeToString()
    await rig.broker.send([an_envelope("honest", payload=honest)])
    await rig.forwarded("honest")
    await until(lambda: rig.forwarder.totals.refused == 1)
    await finish(rig, Job(job_id=0, kind=JobKind.REDRIVE, group=FORWARDER_GROUP))
    await rig.cluster.until(lambda: len(rig.cluster.taken) == 2)
    properties = {
        each: dict(wire.Message.FromString(payload).user_properties) for each, payload in rig.cluster.payloads.items()
    }
    assert properties.pop("honest") == {REFUSED: "by the customer"}
    assert list(properties.values()) == [{PARENT_MESSAGE_ID: "large"}]


@with_lanes
async def test_no_client_reads_as_the_forwarder(rig: LanesRig) -> None:
    """What a client finished under its name would never get to the cluster; nor may a client make the group before."""
    with pytest.raises(Refused):
        await receive(rig, group=FORWARDER_GROUP)
    with pytest.raises(Refused):
        await rig.broker.set_group(FORWARDER_GROUP, is_fifo=True)
    with pytest.raises(Refused):
        await rig.broker.pulls.commit_offset(FORWARDER_GROUP, TOPIC, 0, 7)


@with_lanes
async def test_at_the_end_nothing_is_tried_again(rig: LanesRig) -> None:
    """What got no answer is left for the next run, and with it what comes behind it in its message group."""
    rig.cluster.says(NO_ANSWER)
    await rig.broker.send([an_envelope(each, message_group="g") for each in ("first", "second")])
    await rig.cluster.until(lambda: rig.cluster.calls)
    began_s = asyncio.get_running_loop().time()
    await rig.forwarder.close(60)
    assert asyncio.get_running_loop().time() - began_s < 30
    assert {each for call in rig.cluster.calls for each in call} == {"first"}


@with_lanes
async def test_while_it_is_known_to_be_away_nothing_is_tried(rig: LanesRig) -> None:
    """No topic finds out by itself, whatever comes; all go on once it is back."""
    rig.forwarder.away()
    topics = [f"topic-{number}" for number in range(100)]
    for topic in topics:
        await rig.keep(topic, topic=topic)
    await until(lambda: sum(each.in_flight for each in rig.forwarder.lanes.values()) == len(topics))
    assert not rig.cluster.calls
    rig.forwarder.back()
    await rig.forwarded(*topics)


@with_lanes
async def test_the_trouble_of_many_topics_is_reported_once(rig: LanesRig) -> None:
    """Some are named in the log; the status has them all."""
    rig.cluster.says(NO_ANSWER)
    with capture_logs() as logged:
        for number in range(40):
            await rig.keep(f"m-{number}", topic=f"topic-{number}")
        await until(lambda: rig.forwarder.totals.failing == 40)
        rig.cluster.answer = rig.cluster.ok
        await until(lambda: not rig.forwarder.totals.failing)
    told = Counter(each["event"] for each in logged)
    assert told["forwarding_failed"] == told["forwarding_resumed"] == 20
    assert told["forwarding_failed_for_many"] == 1


@with_lanes
async def test_a_refused_one_takes_no_other_with_it(rig: LanesRig) -> None:
    """Of a call that the cluster refuses for one message the others go by themselves, and none is in doubt."""
    rig.cluster.says(Refused(Rule.BODY_SIZE, "too large"), "bad")
    ids = ["m-0", "bad", "m-1", "m-2"]
    await rig.broker.send([an_envelope(each, payload=b"") for each in ids])
    await rig.forwarded("m-0", "m-1", "m-2")
    await until(lambda: rig.forwarder.totals.refused == 1)
    assert rig.told(EventKind.FORWARD_REFUSED).keys() == {"bad"}
    assert rig.cluster.calls[0] == ids
    assert not rig.told(EventKind.FORWARD_IN_DOUBT)


@with_lanes
async def test_a_step_back_makes_nothing_come_before_its_time(rig: LanesRig) -> None:
    """Not in the figures: it was due, and waits no more however far the clock goes back."""
    late_ms: list[int] = []
    rig.forwarder.totals.observe = late_ms.extend
    rig.forwarder.away()
    await rig.keep("m", deliver_at_ms=rig.clock.now_ms() + 1_000)
    await rig.pass_ms(2_000)
    rig.clock.step_to(rig.clock.now_ms() - 3_600_000)
    rig.forwarder.back()
    await rig.forwarded("m")
    assert late_ms == [0]


async def some_are_kept(rig: LanesRig, rng: Random, sent: dict[str, str]) -> None:
    """Have some messages wait, add them to ``sent`` with their message groups, and let a little happen."""
    for _ in range(rng.randrange(12)):
        message_id = f"m-{len(sent)}"
        sent[message_id] = rng.choice(("", "a", "b"))
        await rig.keep(message_id, message_group=sent[message_id])
    for _ in range(rng.randrange(60)):
        await asyncio.sleep(0)


async def one_history(rig: LanesRig, rng: Random) -> None:
    """Send, be killed at any moment, again and again, before a cluster that answers late or not at all."""
    sent: dict[str, str] = {}
    arrived: list[str] = []
    run = 0

    async def answer(envelopes: Sequence[Envelope]) -> None:
        asked_by = run
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if asked_by != run:  # a process that was killed sends nothing more
            await asyncio.Event().wait()
        fate = rng.random()
        if fate < 0.1:
            raise NO_ANSWER
        arrived.extend(each.message_id for each in envelopes)
        if fate < 0.2:
            await asyncio.Event().wait()
        if fate < 0.3:
            raise NO_ANSWER

    for _ in range(6):
        rig.cluster.answer = answer
        if rng.random() < 0.3:
            rig.forwarder.away()
            await some_are_kept(rig, rng, sent)
            rig.forwarder.back()
        await some_are_kept(rig, rng, sent)
        end = rng.choice((End.KILL, End.KILL, End.POWER_LOSS, End.CLOSE))
        if end is not End.CLOSE:
            run += 1
            rig.cluster.answer = rig.cluster.silent
        await rig.restart(end)

    async def ok(envelopes: Sequence[Envelope]) -> None:
        arrived.extend(each.message_id for each in envelopes)

    rig.cluster.answer = ok
    await rig.forwarded(*sent)
    doubts, copies = rig.told(EventKind.FORWARD_IN_DOUBT), Counter(arrived)
    assert copies.keys() == sent.keys()
    assert not {each: count for each, count in copies.items() if count > 1 + doubts[each]}
    for group in ("a", "b"):
        first = [each for each in dict.fromkeys(arrived) if sent[each] == group]
        assert first == [each for each in sent if sent[each] == group]


@pytest.mark.parametrize("number", range(8 * EFFORT))
def test_through_any_ends_nothing_is_lost_and_each_copy_is_explained(number: int, tmp_path: Path) -> None:
    """Of each message the cluster has one copy and at most one more for each doubt; message groups keep their order."""

    async def scenario(rig: LanesRig) -> None:
        await one_history(rig, Random(SEED + number))

    asyncio.run(play(LanesRig(tmp_path), scenario))
