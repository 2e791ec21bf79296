"""What operators do through the daemon: to groups and their settings, to retries that wait, to dead letters.

Each is asked for as the admin service asks, and looked at from the side of the consumers.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from support.clients.embedded.admin_answers import ask, group_of, groups_of, message_of
from support.clients.embedded.failing import change, comes_after, is_over, pushed, pushed_one
from support.forges.messages.letters import (
    DEAD,
    PURGE,
    REDRIVE,
    UNDERTAKER,
    a_message,
    child_of,
    children,
    counts,
    die,
    dry,
    entries,
    fail,
    fail_again,
    finish,
    forward,
    letters,
    only,
    queued,
    set_policy,
    to_dead,
    waiting,
)
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    every_durable_broker,
    ids,
    play,
    receive,
    receive_one,
)

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire.mapping import decode
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import policy_of
from dmq.broker.failures import waiting_retries as retries_module
from dmq.states import MessageState
from retry.dead_letter import PARENT_MESSAGE_ID, DeadFilter, Job, JobState
from retry.policy import Reason, RetryPolicy

pytestmark = pytest.mark.contract
HOUR_MS = 3_600_000
OTHERS = "others"


# -- groups -----------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_group_shows_its_settings_and_its_counts(rig: EmbeddedRig) -> None:
    """What waits, when it is due, what is dead, what is handed out; by name among all groups; in the next run too."""
    await rig.broker.ensure_group(OTHERS)
    made_at_ms = rig.clock.now_ms()
    told = await set_policy(rig, 5, HOUR_MS)
    assert (told.name, told.created_at_ms, told.waiting, told.dead, told.leased, list(told.due)) == (
        *(GROUP, made_at_ms, 0, 0, 0),
        [],
    )
    assert (told.policy.max_attempts, told.is_default_policy, told.is_fifo_set) == (5, False, False)
    await die(rig, a_message("m-0"), a_message("m-1"))
    await finish(rig, replace(PURGE, filter=only("m-0")))
    await fail(rig, "m-2", "m-3")
    await rig.pass_ms(600_000)
    await fail(rig, "m-4")
    await rig.broker.send([a_message("m-5")])
    await receive_one(rig)
    for leased in (1, 0):
        found = await group_of(rig)
        assert (found.waiting, found.dead, found.leased, found.unread_messages) == (3, 1, leased, 1)
        assert [each.count for each in found.due] == [2, 1]
        due = [each.until_ms for each in found.due]
        assert due[0] > rig.clock.now_ms() + HOUR_MS - 600_000 >= due[0] - 60_000
        assert due[1] - due[0] == 600_000
        every = await groups_of(rig)
        assert [each.name for each in every] == [OTHERS, GROUP]
        del found.due[:], found.lags[:]
        assert every[1] == found
        assert (every[0].is_default_policy, every[0].waiting, every[0].dead) == (True, 0, 0)
        await rig.restart(End.KILL)


@every_durable_broker()
async def test_an_unknown_group_is_refused(rig: EmbeddedRig) -> None:
    """Whatever is asked; only setting it makes it."""
    for request in (
        wire.GetGroupRequest(group=GROUP),
        wire.ListRetriesRequest(group=GROUP, limit=1),
        wire.RunRetriesNowRequest(group=GROUP, entries=["1-1"]),
        wire.EndRetriesRequest(group=GROUP, entries=["1-1"]),
        wire.ListDeadLettersRequest(group=GROUP, limit=1),
        wire.StartJobRequest(group=GROUP, kind=wire.REDRIVE),
    ):
        with pytest.raises(Refused) as refused:
            await ask(rig, request)
        assert (refused.value.rule, refused.value.value) == (Rule.GROUP_UNKNOWN, GROUP)
    with pytest.raises(Refused):
        await ask(rig, wire.SetGroupRequest(group="no group!", is_fifo=True))
    assert await groups_of(rig) == []
    assert (await ask(rig, wire.SetGroupRequest(group=GROUP))).group.is_default_policy
    assert [each.name for each in await groups_of(rig)] == [GROUP]


@every_durable_broker()
async def test_a_lowered_maximum_applies_to_pending_messages(rig: EmbeddedRig) -> None:
    """It is not handed out again: it dies when its time comes, with the attempts it had, also in the next run."""
    await set_policy(rig, 5, 1_000)
    await fail(rig, "m-1")
    await comes_after(rig, 1_000)
    await rig.restart(End.KILL)
    await fail_again(rig)
    await set_policy(rig, 2, 1_000)
    await rig.restart(End.KILL)
    await rig.pass_ms(1_000)
    assert not await pushed(rig)
    assert await is_over(rig)
    (letter,) = await letters(rig)
    assert (letter.dead.message_id, letter.dead.reason, letter.dead.attempts) == ("m-1", Reason.EXHAUSTED, 2)


@every_durable_broker()
async def test_a_raised_or_reset_maximum_applies_to_pending_messages(rig: EmbeddedRig) -> None:
    """It goes on, with the delays that hold when it fails; what is not named in a change stays."""
    await set_policy(rig, 2, 1_000)
    await fail(rig, "m-1")
    await set_policy(rig, 3, 7_000)
    second = await comes_after(rig, 1_000)
    assert second.delivery_attempt == 2
    await change(rig, second)
    told = (await ask(rig, wire.SetGroupRequest(group=GROUP, is_fifo=True))).group
    assert (told.policy.max_attempts, told.is_fifo, told.is_fifo_set) == (3, True, True)
    told = (await ask(rig, wire.SetGroupRequest(group=GROUP, reset_policy=True))).group
    assert (policy_of(told.policy), told.is_default_policy, told.is_fifo, told.is_fifo_set) == (
        RetryPolicy(),
        True,
        True,
        True,
    )
    third = await comes_after(rig, 7_000)
    await change(rig, third)
    assert not await letters(rig)
    assert (await comes_after(rig, 60_000)).delivery_attempt == 4


@every_durable_broker()
async def test_clients_learn_of_a_change_at_once(rig: EmbeddedRig) -> None:
    """Once the change is durable, once for each; what they are told then is what was set."""
    heard: list[tuple[str, bool, int]] = []

    def hear(group: str) -> None:
        settings = rig.broker.group_settings(group)
        heard.append((group, settings.is_fifo, settings.max_attempts))

    rig.broker.on_group_changed = hear
    await set_policy(rig, 4, 1_000)
    for is_fifo in (True, False):
        told = (await ask(rig, wire.SetGroupRequest(group=GROUP, is_fifo=is_fifo))).group
        assert (told.is_fifo, told.is_fifo_set) == (is_fifo, True)
    assert heard == [(GROUP, False, 4), (GROUP, True, 4), (GROUP, False, 4)]
    await rig.restart(End.KILL)
    found = await group_of(rig)
    assert (found.is_fifo, found.is_fifo_set, found.policy.max_attempts) == (False, True, 4)


@every_durable_broker()
async def test_a_group_of_ordered_topics_is_shown_as_served(rig: EmbeddedRig) -> None:
    """Fifo, though nobody set it, as long as what it is subscribed to is ordered."""
    await rig.broker.send([a_message("m-1", message_group="g")])
    await receive(rig)
    for is_fifo in (True, False):
        assert rig.broker.group_settings(GROUP, [TOPIC]).is_fifo == is_fifo
        found = await group_of(rig)
        assert (found.is_fifo, found.is_fifo_set) == (is_fifo, False)
        await rig.broker.send([a_message("m-2")])


# -- what waits -------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_waiting_retry_shows_its_message(rig: EmbeddedRig) -> None:
    """Where it came from, which attempt comes when, when it failed first and last, and the message as it was sent."""
    await set_policy(rig, 5, 1_000)
    envelope = a_message("m-1", keys=("k",))
    await rig.broker.send([envelope])
    failed_at_ms: list[int] = []
    for attempt in (2, 3):
        delivery = await pushed_one(rig)
        await rig.pass_ms(77)  # of work
        failed_at_ms.append(rig.clock.now_ms())
        await change(rig, delivery)
        found = (await waiting(rig))[0]
        for _ in range(2):
            assert await waiting(rig) == [found]
            assert isinstance(found.entry, str)
            assert re.fullmatch(r"\d+-\d+", found.entry)
            assert (found.group, found.topic, found.message_id, found.attempt) == (GROUP, TOPIC, "m-1", attempt)
            assert (found.first_failed_at_ms, found.last_failed_at_ms) == (failed_at_ms[0], failed_at_ms[-1])
            assert (found.due_at_ms, found.payload) == (failed_at_ms[-1] + 1_000, envelope.payload)
            await rig.restart(End.KILL)
        rig.clock.advance(1_000)
        assert await waiting(rig) == [found]  # due, and not yet handed over
        await rig.settle()
        assert await waiting(rig) == []


@every_durable_broker(queues=1)
async def test_pages_join_without_a_gap_or_a_repetition(rig: EmbeddedRig) -> None:
    """In the order of their time, over hours of it, among much that is another's; whatever one call may look at."""
    wanted: list[tuple[str, str]] = []
    for number in range(12):
        await set_policy(rig, 5, 1 + (number % 4) * HOUR_MS + number)
        topic = "refunds" if number % 3 == 0 else TOPIC
        await fail(rig, f"m-{number}", topic=topic)
        await fail(rig, f"x-{number}", group=OTHERS, topic=f"t-{number}")
        later = rig.clock.now_ms() + number * 600_000 + 1
        await rig.broker.send([a_message(f"d-{number}", topic="delayed", deliver_at_ms=later)])
        wanted.append((f"m-{number}", topic))
    wanted.sort(key=lambda each: (int(each[0][2:]) % 4, int(each[0][2:])))
    await set_policy(rig, 5, 5 * HOUR_MS)
    await fail(rig, *(at_once := ["m-20", "m-21", "m-22"]))  # due in the same millisecond
    wanted += [(each, TOPIC) for each in at_once]
    for rows, rows_per_call in ((1_000, 20_000), (2, 20_000), (1, 1), (3, 5)):
        with (
            patch.object(retries_module, "_ROWS_PER_SCAN", rows),
            patch.object(retries_module, "ROWS_PER_CALL_MAX", rows_per_call),
        ):
            for limit in (1, 2, 5, 14, 15, 100):
                assert [(each.message_id, each.topic) for each in await waiting(rig, limit=limit)] == wanted
                refunds = await waiting(rig, topic="refunds", limit=limit)
                assert [each.message_id for each in refunds] == [each for each, topic in wanted if topic == "refunds"]
    first = await rig.broker.retries.page(GROUP, topic="", token="", limit=4)
    await rig.broker.retries.run_now(GROUP, [first.retries[0].entry, first.next_token])  # while somebody looks
    rest = await rig.broker.retries.page(GROUP, topic="", token=first.next_token, limit=100)
    shown = [each.message_id for each in [*first.retries, *rest.retries]]
    assert shown == [each for place, (each, _) in enumerate(wanted) if place != 4]
    assert await waiting(rig, topic="delayed") == []


@every_durable_broker()
async def test_an_impossible_list_is_refused(rig: EmbeddedRig) -> None:
    """A topic that nobody knows, and a token or an entry that is none; then nothing is done to the others either."""
    await set_policy(rig, 5, HOUR_MS)
    await fail(rig, "m-1")
    (entry,) = await entries(rig)
    asked = rig.broker.retries
    with pytest.raises(Refused) as refused:
        await asked.page(GROUP, topic="nowhere", token="", limit=1)
    assert (refused.value.rule, refused.value.value) == (Rule.TOPIC_UNKNOWN, "nowhere")
    for wrong in ("1", "-", "1-", "a-1", "1-1-1", "-1-1", "1" * 20 + "-1", " 1-1"):
        for call in (
            asked.page(GROUP, topic="", token=wrong, limit=1),
            asked.run_now(GROUP, [entry, wrong]),
            asked.end(GROUP, [entry, wrong]),
        ):
            with pytest.raises(Refused) as refused:
                await call
            assert (refused.value.rule, refused.value.value) == (Rule.REQUEST, wrong)
    assert await entries(rig) == [entry]


# -- dead letters -----------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_redriven_letter_is_a_new_message(rig: EmbeddedRig) -> None:
    """An id of its own, a property that names its parent, a count that starts anew; all else as it was sent."""
    later_ms = rig.clock.now_ms() + 1
    await die(rig, a_message("m-1", body=b"as sent", tag="blue", keys=("k1", "k2"), message_group="g"))
    await rig.broker.send([a_message("m-2", topic="refunds", deliver_at_ms=later_ms)])
    await rig.pass_ms(1)
    await forward(rig, topic="refunds")
    before = {each.dead.message_id: decode(each.payload) for each in await letters(rig)}
    assert counts(await finish(rig, REDRIVE)) == (2, 0, 0)
    assert not await letters(rig)
    assert (await group_of(rig)).dead == 0
    for letter, topic in zip(await letters(rig, with_outcome=True), (TOPIC, "refunds"), strict=True):
        child = child_of(rig, letter.dead.message_id, topic).message
        properties = {"color": "red", PARENT_MESSAGE_ID: letter.dead.message_id}
        parent = before[letter.dead.message_id]
        assert child == replace(parent, message_id=child.message_id, properties=properties, deliver_at_ms=0)
        assert re.fullmatch(r"[0-9A-F]{34}", child.message_id)
        assert decode(letter.payload) == parent
        told = letter.outcome and (letter.outcome.what, letter.outcome.at_ms, letter.outcome.note)
        assert told == ("redriven", rig.clock.now_ms(), f"{topic} {child.message_id} for group {GROUP}")
        assert (await message_of(rig, child.message_id, topic=topic)).state is MessageState.QUEUED
        (delivery,) = await receive(rig, topic=topic)
        assert (delivery.message_id, delivery.delivery_attempt, delivery.dead_letter) == (child.message_id, 1, None)
    assert not await receive(rig, group=UNDERTAKER, topic=DEAD)


@every_durable_broker()
async def test_a_redrive_goes_to_another_topic(rig: EmbeddedRig) -> None:
    """What was redriven can die there and be redriven again, from its own letter."""
    await die(rig, a_message("m-1"))
    await rig.broker.operator.create_topic("elsewhere", queues=0, message_type=None)
    await finish(rig, replace(REDRIVE, to_topic="elsewhere"))
    assert children(rig, TOPIC) == {}
    first = child_of(rig, "m-1", "elsewhere").message
    assert (first.topic, first.body) == ("elsewhere", b"body")
    await rig.restart(End.KILL)
    await forward(rig, topic="elsewhere")
    (letter,) = await letters(rig)
    assert (letter.dead.message_id, letter.dead.origin_topic) == (first.message_id, "elsewhere")
    await finish(rig, REDRIVE)
    second = child_of(rig, first.message_id, "elsewhere").message
    assert second.properties[PARENT_MESSAGE_ID] == first.message_id
    assert len({"m-1", first.message_id, second.message_id}) == 3


@pytest.mark.parametrize("job", [REDRIVE, PURGE], ids=lambda job: str(job.kind))
def test_a_job_processes_the_matches_of_its_filter(tmp_path: Path, job: Job) -> None:
    """By reason, topic, key, time and id, each letter once; what no filter means stays as it is."""

    async def scenario(rig: EmbeddedRig) -> None:
        await set_policy(rig, 3, HOUR_MS)
        await die(rig, a_message("m-1", topic="refunds"), a_message("m-2", keys=("k", "l")))
        await rig.pass_ms(1_000)
        now_ms = rig.clock.now_ms()
        await die(rig, a_message("m-3"))
        await rig.pass_ms(1_000)
        await fail(rig, "m-0")
        await to_dead(rig, *await entries(rig))
        await die(rig, a_message("m-4"), a_message("m-5"))
        before = {each.dead.message_id: each for each in await letters(rig)}
        for number, chosen in enumerate(
            (
                DeadFilter(reasons=frozenset({Reason.OPERATOR})),
                DeadFilter(topics=frozenset({"refunds", "nowhere"})),
                DeadFilter(keys=frozenset({"l", "z"})),
                DeadFilter(since_ms=now_ms, until_ms=now_ms + 1),
                only("m-4"),
            )
        ):
            wanted = replace(job, filter=chosen)
            counted = await dry(rig, wanted)
            done = await finish(rig, wanted)
            assert (counts(done)[::2], counts(counted)) == ((1, 0), counts(done))
            del before[f"m-{number}"]
            assert await letters(rig) == list(before.values())
            assert [each.state for each in rig.broker.dead_letters.jobs(GROUP)] == [JobState.DONE] * (number + 1)
        assert list(before) == ids(await receive(rig, group=UNDERTAKER, topic=DEAD)) == ["m-5"]

    for on_disk in (True, False):
        asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk, queues=1), scenario))


@every_durable_broker()
async def test_a_purged_letter_is_a_fact_without_a_body(rig: EmbeddedRig) -> None:
    """What it was and why it died stays; what it said is gone; nobody gets it any more, who had it not again either."""
    await die(rig, a_message("m-1", body=b"secret", tag="blue", keys=("k",)), a_message("m-2", body=b"secret"))
    before = await letters(rig)
    assert len(await receive(rig, group=UNDERTAKER, topic=DEAD)) == 2
    assert counts(await finish(rig, replace(PURGE, filter=only("m-1")))) == (1, 1, 0)
    for _ in range(2):
        purged, kept = await letters(rig, with_outcome=True)
        assert purged.dead == before[0].dead
        assert purged.outcome
        assert (purged.outcome.what, purged.outcome.note) == ("purged", PURGE.why)
        left = decode(purged.payload)
        assert (left.message_id, left.keys, left.tag, left.body, left.properties) == ("m-1", ("k",), "blue", b"", {})
        assert [b"secret" in record.payload for _, _, record in queued(rig, DEAD)] == [False, True]
        assert [kept] == await letters(rig) == before[1:]
        for group in (UNDERTAKER, OTHERS):
            await rig.pass_ms(HOUR_MS)
            assert ids(await receive(rig, group=group, topic=DEAD)) == ["m-2"]
        await rig.restart(End.KILL)
