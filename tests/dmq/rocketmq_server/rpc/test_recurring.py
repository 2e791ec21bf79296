"""Sends that make schedules: what their properties mean, what is refused, and that nothing is stored beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from support.clients.wire.protocol import a_message, a_send, from_client
from support.forges.messages.schedules import check_rows, occurrences
from support.rigs.broker.rig import EmbeddedRig, play
from support.rigs.store.rows import waiting_rows

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import decode
from dmq.acl.quotas import ADDRESS, Holder, Quota
from dmq.broker.schedules.schedules import Schedules
from dmq.broker.topics.catalog import ScheduleLimits
from dmq.http2 import Admission
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.recurring import WAITING_MAX, wanted_of
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.store.schema.messages.recurring import CatchUp


class _Quiet:
    def call_done(self, rpc: str, code: int, seconds: float) -> None:
        pass


class Served:
    """The sidecar in front of an embedded broker."""

    def __init__(self, rig: EmbeddedRig, *, recurs: bool = True) -> None:
        add = rig.broker.schedules.add if recurs else None
        service = MessagingService(
            rig.broker, rig.clock, Sessions(rig.clock), SidecarConfig(), rig.broker.transactions, add_schedule=add
        )
        self.quotas = service.quotas
        self.rig, self.dispatcher = rig, Dispatcher(service, clock=rig.clock, observer=_Quiet())

    async def send(self, *messages: wire.Message, call: Call | None = None) -> wire.SendMessageResponse:
        """Send messages in one request."""
        body = a_send(*messages).SerializeToString()
        answer = await self.dispatcher.unary("SendMessage")(body, call or from_client())
        return wire.SendMessageResponse.FromString(answer)


def run(scenario: Callable[[Served], Coroutine[object, object, None]], tmp_path: Path, *, recurs: bool = True) -> None:
    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), lambda rig: scenario(Served(rig, recurs=recurs))))


def recurring(message_id: str = "01A", **properties: str) -> wire.Message:
    """A message every five minutes, unless its rule is given."""
    rule = {} if "DMQ_CRON" in properties else {"DMQ_EVERY": "5m"}
    made = a_message(message_id, properties={"DMQ_SCHEDULE_NAME": "report", "color": "red"} | rule | properties)
    made.system_properties.tag = "t"
    made.system_properties.keys.append("k")
    return made


def test_a_send_makes_a_schedule(tmp_path: Path) -> None:
    """It is answered under its id, stores nothing else, and each occurrence is what was sent but for our properties."""

    async def scenario(served: Served) -> None:
        rig, began_ms = served.rig, served.rig.clock.now_ms()
        answer = await served.send(recurring("01A", DMQ_COUNT="2"))
        assert (answer.status.code, answer.entries[0].message_id) == (wire.OK, "01A")
        assert not answer.entries[0].recall_handle
        assert list(check_rows(rig)) == ["report"]
        assert len(list(waiting_rows(rig.store))) == 1
        assert occurrences(rig, "report", "orders") == []
        for number in (1, 2, 3):
            await rig.pass_ms(300_000)
            found = occurrences(rig, "report", "orders")
            assert found == [(n, began_ms + n * 300_000) for n in (1, 2)[:number]]
        payload = (await rig.broker.schedules.show("report")).payload
        message = decode(payload)
        assert (message.body, message.tag, message.keys, dict(message.properties)) == (
            b"body",
            "t",
            ("k",),
            {"color": "red"},
        )

    run(scenario, tmp_path)


def test_repeated_it_is_the_same(tmp_path: Path) -> None:
    """Under another id, later, with a start that counts from now: OK, and nothing was changed; other content is not."""

    async def scenario(served: Served) -> None:
        rig = served.rig
        for number in range(3):
            answer = await served.send(recurring(f"01{number}", DMQ_START="+1h"))
            assert (answer.status.code, answer.entries[0].message_id) == (wire.OK, f"01{number}")
            await rig.pass_ms(60_000)
        for other in (recurring(DMQ_START="+2h"), recurring(DMQ_START="+1h", color="blue")):
            answer = await served.send(other)
            assert answer.status.code == answer.entries[0].status.code == wire.ILLEGAL_MESSAGE_PROPERTY_KEY
            assert "another content" in answer.status.message
        assert list(check_rows(rig)) == ["report"]

    run(scenario, tmp_path)


def test_every_property_is_read() -> None:
    """In the words of dmq cron add."""
    found = wanted_of(
        "orders",
        recurring(
            DMQ_CRON="0 3 * * *",
            DMQ_TIME_ZONE="Europe/Paris",
            DMQ_START="2027-01-01T00:00:00Z",
            DMQ_END="+30d",
            DMQ_COUNT="9",
            DMQ_JITTER="90s",
            DMQ_CATCH_UP="all",
        ),
    )
    assert (found.name, found.topic, found.cron, found.zone) == ("report", "orders", "0 3 * * *", "Europe/Paris")
    assert (found.every_ms, found.start_ms, found.start_after_ms) == (0, 1_798_761_600_000, None)
    assert (found.end_ms, found.end_after_ms, found.count, found.jitter_ms) == (0, 30 * 86_400_000, 9, 90_000)
    assert found.catch_up is CatchUp.ALL
    assert wanted_of("orders", recurring(DMQ_EVERY="60000", DMQ_START="+250")).every_ms == 60_000  # as it is sent today
    assert wanted_of("orders", recurring(DMQ_START="-1h")).start_after_ms == -3_600_000


@pytest.mark.parametrize(
    ("properties", "rule", "text"),
    [
        ({"DMQ_SCHEDULE_NAME": ""}, Rule.REQUEST, "invalid schedule name"),
        ({"DMQ_SCHEDULE_NAME": "a b"}, Rule.REQUEST, "invalid schedule name, got 'a b', limit 1 to 127"),
        ({"DMQ_CRON": "* * * * *", "DMQ_EVERY": "5m"}, Rule.PROPERTY_KEY, "either DMQ_EVERY or DMQ_CRON, got 'both'"),
        ({"DMQ_CRON": ""}, Rule.PROPERTY_KEY, "DMQ_CRON is empty"),
        ({"DMQ_EVERY": "soon"}, Rule.PROPERTY_KEY, "DMQ_EVERY: a duration is expected, such as 500ms"),
        ({"DMQ_EVERY": "0s"}, Rule.PROPERTY_KEY, "DMQ_EVERY: more than 0"),
        ({"DMQ_JITTER": "-1s"}, Rule.PROPERTY_KEY, "DMQ_JITTER: a duration is expected"),
        ({"DMQ_START": "tomorrow"}, Rule.PROPERTY_KEY, "DMQ_START: RFC 3339 with a time zone"),
        ({"DMQ_END": "1700000000"}, Rule.PROPERTY_KEY, "DMQ_END: expected epoch milliseconds"),
        ({"DMQ_COUNT": "9" * 5_000}, Rule.PROPERTY_KEY, "DMQ_COUNT: a whole number"),
        ({"DMQ_COUNT": "-1"}, Rule.PROPERTY_KEY, "DMQ_COUNT: a whole number"),
        ({"DMQ_CATCH_UP": "none"}, Rule.PROPERTY_KEY, "got 'none', limit one, all, skip"),
        (
            {"DMQ_TIMEZONE": "UTC"},
            Rule.PROPERTY_KEY,
            "unknown property of a schedule, got 'DMQ_TIMEZONE', limit DMQ_SCHEDULE_NAME",
        ),
        ({"DMQ_SCHEDULE": "x"}, Rule.PROPERTY_KEY, "this property is set by the schedule"),
        ({"DELAY": "2"}, Rule.DELIVERY_TIME, "a schedule has no delivery time, got 'DELAY'"),
        ({"TIMER_DELAY_MS": "2"}, Rule.DELIVERY_TIME, "a schedule has no delivery time"),
        ({"DMQ_NOT_AFTER_MS": "1795700000000"}, Rule.DELIVERY_TIME, "DMQ_END instead of this property"),
    ],
)
def test_unreadable_input_is_refused(properties: dict[str, str], rule: Rule, text: str) -> None:
    """By the property's name, with what was given and what is allowed."""
    with pytest.raises(Refused) as caught:
        wanted_of("orders", recurring(**properties))
    assert caught.value.rule is rule
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"DMQ_EVERY": "999ms"}, "out of range"),
        ({"DMQ_TIME_ZONE": "Europe/Paris"}, "a time zone requires a cron expression"),
        ({"DMQ_JITTER": "6m"}, "the jitter in ms is out of range"),
        ({"DMQ_CRON": "61 * * * *"}, "invalid minute '61'"),
        ({"DMQ_CRON": "0 0 * * *", "DMQ_TIME_ZONE": "../etc/passwd"}, "is not known on this host"),
        ({"DMQ_CRON": "0 0 30 2 *"}, "no occurrence"),
        ({"DMQ_END": "-1h"}, "no occurrence"),
        ({"DMQ_SCHEDULE_NAME": "a/b"}, "invalid schedule name"),
    ],
)
def test_bounds_are_those_of_the_command(properties: dict[str, str], text: str, tmp_path: Path) -> None:
    """Refused as an illegal property; nothing is kept."""

    async def scenario(served: Served) -> None:
        answer = await served.send(recurring(**properties))
        assert answer.entries[0].status.code == wire.ILLEGAL_MESSAGE_PROPERTY_KEY
        assert text in answer.status.message
        assert not check_rows(served.rig)

    run(scenario, tmp_path)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    """A rule without a name, beside other messages, in a transaction, with a delivery time, for dead letters."""

    async def scenario(served: Served) -> None:
        for property_ in ("DMQ_CRON", "DMQ_EVERY", "DMQ_COUNT"):
            answer = await served.send(a_message(properties={property_: "5m"}))
            assert answer.status.code == wire.ILLEGAL_MESSAGE_PROPERTY_KEY
            assert f"{property_} requires DMQ_SCHEDULE_NAME" in answer.status.message
        answer = await served.send(a_message("01B"), recurring())
        assert [entry.status.code for entry in answer.entries] == [wire.BAD_REQUEST, wire.BAD_REQUEST]
        assert "in a request of its own" in answer.entries[1].status.message
        half = recurring()
        half.system_properties.message_type = wire.TRANSACTION
        answer = await served.send(half)
        assert answer.status.code == wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        assert "without a transaction" in answer.status.message
        late = recurring()
        late.system_properties.delivery_timestamp.seconds = 1_900_000_000
        assert (await served.send(late)).status.code == wire.ILLEGAL_DELIVERY_TIME
        undelayed = recurring()
        undelayed.system_properties.message_type = wire.DELAY
        assert (await served.send(undelayed)).status.code == wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        dead = recurring()
        dead.topic.name = "%DLQ%group"
        assert (await served.send(dead)).status.code == wire.ILLEGAL_TOPIC
        assert not check_rows(served.rig)
        assert not list(waiting_rows(served.rig.store))

    run(scenario, tmp_path)


def test_a_message_group_keeps_its_order(tmp_path: Path) -> None:
    """Occurrences are of the group that was sent."""

    async def scenario(served: Served) -> None:
        message = recurring()
        message.system_properties.message_group = "g"
        message.system_properties.message_type = wire.FIFO
        assert (await served.send(message)).status.code == wire.OK
        assert (await served.rig.broker.schedules.show("report")).schedule.message_group == "g"

    run(scenario, tmp_path)


def test_their_number_is_bounded(tmp_path: Path) -> None:
    """Over the bounds of schedules, and of sends that make some at a time: 42900, and nothing is half done."""

    async def scenario(served: Served) -> None:
        broker = served.rig.broker
        broker.schedules = Schedules(broker.shared, ScheduleLimits(2, 2))
        served = Served(served.rig)
        sends = [served.send(recurring(DMQ_SCHEDULE_NAME=f"s-{number}")) for number in range(WAITING_MAX + 1)]
        answers = await asyncio.gather(*sends)
        codes = [answer.status.code for answer in answers]
        assert (codes.count(wire.OK), codes.count(wire.TOO_MANY_REQUESTS)) == (2, WAITING_MAX - 1)
        assert "schedules_max = 2" in answers[2].status.message
        assert "sends in flight that make schedules" in answers[-1].status.message
        assert len(check_rows(served.rig)) == 2

    run(scenario, tmp_path)


def test_schedules_of_one_address_are_bounded(tmp_path: Path) -> None:
    """Danger: one client takes all there may be. One that was removed makes room, one that is under way does not."""

    async def scenario(served: Served) -> None:
        schedules, clock, quotas = served.rig.broker.schedules, served.rig.clock, served.quotas
        there = from_client()
        there.admission = Admission(address="10.0.0.7")
        quotas.is_known = lambda quota, name: quota is not Quota.SCHEDULES or schedules.is_known(name)
        quotas.change(Holder(ADDRESS, "10.0.0.7"), Quota.SCHEDULES, 2)
        sends = [served.send(recurring(DMQ_SCHEDULE_NAME=name), call=there) for name in ("one", "two", "three", "one")]
        one, two, three, one_again = [answer.status for answer in await asyncio.gather(*sends)]
        assert one.code == two.code == one_again.code == wire.OK
        assert three.code == wire.TOO_MANY_REQUESTS
        assert three.message.startswith("quota schedules of address 10.0.0.7: 2 in use (limit 2)")
        assert not schedules.is_known("three")
        await schedules.remove("one")
        clock.advance(1_000)
        assert (await served.send(recurring(DMQ_SCHEDULE_NAME="three"), call=there)).status.code == wire.OK
        assert (await served.send(recurring(DMQ_SCHEDULE_NAME="four"))).status.code == wire.OK  # of somebody else

    run(scenario, tmp_path)


def test_a_broker_without_transactions_is_reported(tmp_path: Path) -> None:
    """It is not taken for a message to be sent now."""

    async def scenario(served: Served) -> None:
        assert (await served.send(recurring())).status.code == wire.NOT_IMPLEMENTED
        assert not list(waiting_rows(served.rig.store))

    run(scenario, tmp_path, recurs=False)
