"""Notifications of a real broker to a real receiver, and to a topic: content, rate, retries, kills, loops."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
from support.forges.messages.letters import REDRIVE, a_message, die, die_many, finish, forward
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, ack, every_durable_broker, receive
from support.rigs.services.webhooks import PATIENCE_S, SECRET, Receiver, answer, is_signed, receiving, secret_file
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.message import MessageType
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.broker.topics import FlowChange
from dmq.config.settings import DaemonConfig
from dmq.notifications import Notifier, notifiers_of
from dmq.notifications.notifier import AT_ONCE_MAX
from dmq.store.schema.keys import META_NOTIFIED, Family
from retry.failure_reason import FailureReason

pytestmark = pytest.mark.contract
EVERY_S = 300.0
MINUTE_MS = 60_000


def notifier(rig: EmbeddedRig, folder: Path, receiver: Receiver, **settings: object) -> Notifier:
    """The notifier of dead letters of a daemon with a webhook; each run has another one."""
    config = DaemonConfig.model_validate(
        {
            "on_dead_letter": receiver.url,
            "webhook_secret_file": str(secret_file(folder, SECRET)),
            "webhook_private_addresses": True,
            **settings,
        }
    )
    (made,) = notifiers_of(config, rig.broker)
    return made


def to_topic(rig: EmbeddedRig, name: str = "alerts") -> Notifier:
    (made,) = notifiers_of(DaemonConfig.model_validate({"on_dead_letter": f"topic:{name}"}), rig.broker)
    return made


def of_overdue(rig: EmbeddedRig) -> Notifier:
    (made,) = notifiers_of(DaemonConfig.model_validate({"on_overdue": "topic:alerts"}), rig.broker)
    return made


def overdue_webhooks(rig: EmbeddedRig, receiver: Receiver) -> Notifier:
    return notifier(rig, rig._path, receiver, on_dead_letter="none", on_overdue=receiver.url)


async def notifications(rig: EmbeddedRig) -> list[dict[str, object]]:
    """The notifications in the topic that the group "watchers" has not got yet."""
    found = await receive(rig, group="watchers", topic="alerts")
    await ack(rig, *found, group="watchers", topic="alerts")
    messages = [wire.Message.FromString(each.payload) for each in found]
    return [json.loads(each.body)["data"] for each in messages]


@every_durable_broker(queues=1)
async def test_a_dead_letter_is_reported_at_once(rig: EmbeddedRig) -> None:
    """Signed, with the error and the id of the message, and without its body, key or properties."""
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await made.look()
        assert receiver.connections == 0
        await rig.broker.send([a_message("m-1", body=b"secret body", keys=("secret key",))])
        (delivery,) = await receive(rig)
        reason = FailureReason("TimeoutError", "no courier")
        rig.broker.note_failure(GROUP, delivery.receipt_handle, reason)
        await rig.broker.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1)
        await made.look()
        webhook = receiver.next()
    assert is_signed(webhook)
    assert int(webhook.headers["webhook-timestamp"]) == rig.clock.now_ms() // 1000
    assert json.loads(webhook.body)["type"] == "rockdmq.dead_letter"
    assert webhook.data == {
        "cell": rig.store.cell_id,
        "group": GROUP,
        "count": 1,
        "first_offset": 0,
        "end_offset": 1,
        "errors": [
            {
                "topic": TOPIC,
                "reason": "forwarded",
                "error": "TimeoutError: no courier",
                "count": 1,
                "message_ids": ["m-1"],
            }
        ],
        "count_without_error": 0,
    }
    assert b"secret" not in webhook.body
    assert (made.totals.sent, made.totals.failed, made.totals.suppressed) == (1, 0, 0)


@every_durable_broker(queues=1)
async def test_later_letters_of_a_group_are_counted(rig: EmbeddedRig) -> None:
    """One notification in each interval, grouped by error, with a few ids; another group does not wait."""
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 1)
        await made.look()
        await die_many(rig, 7, first=1)
        await die(rig, a_message("other", topic="refunds"), group=GROUP)
        await die(rig, a_message("theirs", topic="fees"), group="theirs")
        await made.look()
        assert [receiver.next().data["group"] for _ in range(2)] == [GROUP, "theirs"]
        rig.clock.advance(int(EVERY_S * 1000) - 1)
        await made.look()
        assert receiver.connections == 2
        rig.clock.advance(1)
        await made.look()
        data = receiver.next().data
    assert (data["group"], data["count"], data["first_offset"], data["end_offset"]) == (GROUP, 8, 1, 9)
    assert [(each["topic"], each["count"]) for each in data["errors"]] == [(TOPIC, 7), ("refunds", 1)]
    assert data["errors"][0]["message_ids"] == [f"m-{number}" for number in range(1, 6)]
    assert (made.totals.sent, made.totals.suppressed) == (3, 7)


@every_durable_broker(queues=1)
async def test_a_failed_notification_is_sent_again_with_its_id(rig: EmbeddedRig) -> None:
    """After a pause that doubles; a kill of the daemon in between changes nothing."""
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 1)
        receiver.answers.put(answer(503))
        receiver.answers.put(b"")  # accepted, perhaps: no answer
        await made.look()
        rig.clock.advance(4_999)
        await made.look()
        assert receiver.connections == 1
        rig.clock.advance(1)
        await made.look()
        rig.clock.advance(9_999)
        await made.look()
        assert (receiver.connections, made.totals.failed) == (2, 2)
        await rig.restart(End.KILL)
        made = notifier(rig, rig._path, receiver)
        await made.look()
        ids = {receiver.next().headers["webhook-id"] for _ in range(3)}
        assert (len(ids), made.totals.sent) == (1, 1)


@every_durable_broker(queues=1)
async def test_a_delivered_notification_is_not_repeated(rig: EmbeddedRig) -> None:
    """The position is durable: the next run reports only later letters."""
    with receiving() as receiver:
        await die_many(rig, 2)
        await notifier(rig, rig._path, receiver).look()
        await rig.restart(End.KILL)
        made = notifier(rig, rig._path, receiver)
        await made.look()
        await die_many(rig, 1, first=2)
        await made.look()
        assert [receiver.next().data["count"] for _ in range(2)] == [2, 1]
        assert receiver.connections == 2


@every_durable_broker(queues=1)
async def test_letters_with_an_outcome_are_not_reported(rig: EmbeddedRig) -> None:
    """Those that were redriven before the notification."""
    with receiving() as receiver:
        await die_many(rig, 3)
        await finish(rig, REDRIVE)
        made = notifier(rig, rig._path, receiver)
        await made.look()
        assert receiver.connections == 0
        await die(rig, a_message("later", topic="refunds"))
        await made.look()
        assert receiver.next().data["errors"][0]["message_ids"] == ["later"]


@every_durable_broker(queues=1)
async def test_many_letters_are_counted_and_not_read(rig: EmbeddedRig) -> None:
    """The count is of all, and of the others it is said that their error is not in the notification."""
    with receiving() as receiver:
        await die_many(rig, 230)
        await notifier(rig, rig._path, receiver).look()
        data = receiver.next().data
    assert (data["count"], data["errors"][0]["count"], data["count_without_error"]) == (230, 200, 30)


@every_durable_broker(queues=1)
async def test_a_refused_subject_does_not_stop_the_others(rig: EmbeddedRig) -> None:
    """A receiver that refuses the notification of one group gets those of other groups, and this one again."""
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 1)
        receiver.answers.put(answer(400))
        await made.look()
        await die(rig, a_message("theirs", topic="refunds"), group="theirs")
        rig.clock.advance(5_000)
        await made.look()
        groups = [receiver.next().data["group"] for _ in range(3)]
    assert groups[0] == GROUP
    assert sorted(groups[1:]) == sorted([GROUP, "theirs"])


@every_durable_broker(queues=1)
async def test_a_slow_receiver_does_not_stop_the_loop_nor_the_end(rig: EmbeddedRig) -> None:
    """While the receiver is silent the broker serves, and the notifier ends at once."""
    with receiving() as receiver:
        receiver.answers.put(silence)
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 1)
        made.start()
        await asyncio.to_thread(receiver.next)
        await die_many(rig, 3, first=1)
        await made.close()
    assert made.totals.sent == 0


@every_durable_broker(queues=1)
async def test_a_removed_queue_is_forgotten(rig: EmbeddedRig) -> None:
    """With its position; a later one of the same name is reported from its start."""
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 2)
        await made.look()
        assert position_rows(rig) == 1
        await rig.broker.operator.remove_group(GROUP, is_forced=True, with_dead_letters=True)
        await made.look()
        assert position_rows(rig) == 0
        await die(rig, a_message("later", topic="fees"))
        rig.clock.advance(int(EVERY_S * 1000))
        await made.look()
        assert [receiver.next().data["first_offset"] for _ in range(2)] == [0, 0]


def silence(connection: socket.socket) -> None:
    """Wait for the end of the connection."""
    connection.recv(1)


def position_rows(rig: EmbeddedRig) -> int:
    return sum(key[:1] == META_NOTIFIED and len(key) == 5 for key, _ in all_rows(rig.store, Family.META))


@every_durable_broker(queues=1)
async def test_a_topic_gets_each_notification_once(rig: EmbeddedRig) -> None:
    """Message and position are one unit, whatever ends the run."""
    await die_many(rig, 2)
    await to_topic(rig).look()
    await rig.restart(End.KILL)
    made = to_topic(rig)
    await made.look()
    await die_many(rig, 1, first=2)
    await made.look()
    assert [each["count"] for each in await notifications(rig)] == [2, 1]


@every_durable_broker(queues=1)
async def test_failed_notifications_cause_none(rig: EmbeddedRig) -> None:
    """A consumer of the topic whose notifications become dead letters gets no notification of them."""
    made = to_topic(rig)
    await die_many(rig, 1)
    await made.look()
    await forward(rig, group="watchers", topic="alerts")
    for _ in range(3):
        rig.clock.advance(int(EVERY_S * 1000))
        await made.look()
    assert await notifications(rig) == []
    assert made.totals.sent == 1


@every_durable_broker(queues=1)
async def test_a_topic_of_another_type_is_a_failure(rig: EmbeddedRig) -> None:
    """It is tried again, and nothing is lost."""
    await rig.broker.operator.create_topic("alerts", queues=1, message_type=MessageType.FIFO)
    made = to_topic(rig)
    await die_many(rig, 1)
    await made.look()
    assert (made.totals.sent, made.totals.failed) == (0, 1)


@every_durable_broker(queues=1)
async def test_overdue_messages_are_reported(rig: EmbeddedRig) -> None:
    """Those that no scheduler moved, once in an interval while it lasts; not those that are due since a moment."""
    made = of_overdue(rig)
    due_ms = rig.clock.now_ms() + MINUTE_MS
    await rig.broker.send([a_message(f"m-{n}", deliver_at_ms=due_ms) for n in range(3)])
    await rig.broker.send([a_message("later", topic="refunds", deliver_at_ms=due_ms + 60 * MINUTE_MS)])
    rig.clock.advance(MINUTE_MS + 1_000)
    await made.look()
    assert await notifications(rig) == []
    rig.clock.advance(2 * MINUTE_MS)
    await made.look()
    await made.look()
    (data,) = await notifications(rig)
    assert (data["count"], data["topics"], data["groups"]) == (3, [{"topic": TOPIC, "count": 3}], [])
    assert data["message_ids"] == ["m-0", "m-1", "m-2"]
    rig.clock.advance(int(EVERY_S * 1000))
    await made.look()
    assert [each["count"] for each in await notifications(rig)] == [3]
    await rig.settle()
    rig.clock.advance(int(EVERY_S * 1000))
    await made.look()
    assert await notifications(rig) == []


@every_durable_broker(queues=1)
async def test_a_delay_that_ends_before_its_notification_is_reported(rig: EmbeddedRig) -> None:
    """At least once, with one id: the receiver fails, the daemon is killed, and the messages are delivered."""
    await rig.broker.send([a_message("m-1", deliver_at_ms=rig.clock.now_ms() + MINUTE_MS)])
    rig.clock.advance(3 * MINUTE_MS)
    with receiving() as receiver:
        made = overdue_webhooks(rig, receiver)
        receiver.answers.put(answer(503))
        receiver.answers.put(b"")  # accepted, perhaps: no answer
        await made.look()
        await rig.restart(End.KILL)
        await rig.settle()
        made = overdue_webhooks(rig, receiver)
        await made.look()
        assert made.totals.failed == 1
        await rig.restart(End.KILL)
        made = overdue_webhooks(rig, receiver)
        await made.look()
        assert made.totals.sent == 1
        webhooks = [receiver.next() for _ in range(3)]
        assert {each.headers["webhook-id"] for each in webhooks} == {webhooks[0].headers["webhook-id"]}
        assert {each.body for each in webhooks} == {webhooks[0].body}
        assert webhooks[0].data["message_ids"] == ["m-1"]
        rig.clock.advance(int(EVERY_S * 1000))
        await made.look()
        assert receiver.connections == 3


@every_durable_broker(queues=1)
async def test_a_delay_is_not_reported_again_by_the_next_run(rig: EmbeddedRig) -> None:
    """Only once the interval is over, by whichever run; a kill between two reports repeats none."""
    await rig.broker.send([a_message("m-1", deliver_at_ms=rig.clock.now_ms() + MINUTE_MS)])
    rig.clock.advance(3 * MINUTE_MS)
    with receiving() as receiver:
        await overdue_webhooks(rig, receiver).look()
        await rig.restart(End.KILL)
        rig.clock.advance(int(EVERY_S * 1000) - 1)
        await overdue_webhooks(rig, receiver).look()
        assert receiver.connections == 1
        rig.clock.advance(1)
        await overdue_webhooks(rig, receiver).look()
        first, second = receiver.next(), receiver.next()
        assert first.headers["webhook-id"] != second.headers["webhook-id"]


@every_durable_broker(queues=1)
async def test_a_delay_by_a_full_disk_is_reported_meanwhile(rig: EmbeddedRig) -> None:
    """Once in an interval of this run, although nothing can be stored."""
    await rig.broker.send([a_message("m-1", deliver_at_ms=rig.clock.now_ms() + MINUTE_MS)])
    rig.clock.advance(3 * MINUTE_MS)
    with receiving() as receiver, patch.object(rig.store, "write_obstacle", return_value="the disk is full"):
        made = overdue_webhooks(rig, receiver)
        await made.look()
        await made.look()
        assert (receiver.next().data["count"], receiver.connections, made.totals.sent) == (1, 1, 1)


@every_durable_broker(queues=1)
async def test_held_messages_are_not_overdue(rig: EmbeddedRig) -> None:
    """A paused topic is late on purpose."""
    made = of_overdue(rig)
    await rig.broker.send([a_message("m-1", deliver_at_ms=rig.clock.now_ms() + MINUTE_MS)])
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
    await rig.pass_ms(MINUTE_MS)
    rig.clock.advance(10 * MINUTE_MS)
    await made.look()
    assert made.totals.sent == 0


@every_durable_broker(queues=1)
async def test_letters_during_a_delivery_are_in_the_next_notification(rig: EmbeddedRig) -> None:
    """The counts of all notifications add up to the dead letters."""
    release = threading.Event()

    def hold(connection: socket.socket) -> None:
        release.wait(PATIENCE_S)
        connection.sendall(answer(200))

    with receiving() as receiver:
        receiver.answers.put(hold)
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 2)
        looking = asyncio.ensure_future(made.look())
        first = await asyncio.to_thread(receiver.next)
        await die_many(rig, 3, first=2)
        release.set()
        await looking
        rig.clock.advance(int(EVERY_S * 1000))
        await made.look()
        second = receiver.next()
    assert [each.data["count"] for each in (first, second)] == [2, 3]


@every_durable_broker(queues=1)
async def test_nothing_is_sent_while_its_position_cannot_be_stored(rig: EmbeddedRig) -> None:
    """Else a full disk or an unreachable copy would repeat one notification until it ends."""
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await die_many(rig, 1)
        with patch.object(rig.store, "write_obstacle", return_value="the disk is full"):
            await made.look()
        assert (receiver.connections, made.totals.failed) == (0, 1)
        assert made.problem.endswith("the disk is full")
        rig.clock.advance(5_000)
        await made.look()
        assert (receiver.connections, made.totals.sent, made.problem) == (1, 1, "")


@every_durable_broker(queues=1)
async def test_notifications_of_many_groups_are_spread(rig: EmbeddedRig) -> None:
    """A look delivers a bounded number; the other groups follow in the next looks, each once."""
    groups = [f"g-{number}" for number in range(AT_ONCE_MAX + 2)]
    await rig.broker.send([a_message("m-1")])
    for group in groups:
        await forward(rig, group=group)
    with receiving() as receiver:
        made = notifier(rig, rig._path, receiver)
        await made.look()
        assert made.totals.sent == AT_ONCE_MAX
        for _ in range(3):
            await made.look()
        assert sorted(receiver.next().data["group"] for _ in groups) == groups
        assert receiver.connections == len(groups)
