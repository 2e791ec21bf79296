"""An application makes a schedule by a send: through an official client, with a key, and in front of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clients.official.client import PYTHON, ClientError, OfficialClient
from support.rigs.daemon.acl import OPERATOR, READER, SHOP, write_acl
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.front import client, front_of, play, receive
from support.rigs.rocketmq.real_time import a_message, now_ms

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.schedules import OCCURRENCE, SCHEDULE
from broker_adapter.wire.mapping import decode, encode
from dmq import AdminClient

pytestmark = pytest.mark.integration
TICK = {"DMQ_SCHEDULE_NAME": "tick", "DMQ_EVERY": "1s", "DMQ_COUNT": "2", "DMQ_CATCH_UP": "all", "color": "red"}


def test_an_application_makes_a_schedule_with_its_key(tmp_path: Path) -> None:
    """PUB on the topic is enough, and SUB is not; the occurrences come to its consumer, a wrong one is refused."""
    with Daemon(tmp_path / "data", "--acl", str(write_acl(tmp_path))) as daemon:
        with OfficialClient(PYTHON, tmp_path, daemon.address) as official:
            official.start("shop", "producer", "orders", **SHOP.credentials)
            sent = official.send("shop", "orders", body="tock", tag="t", properties=TICK)
            assert official.send("shop", "orders", body="tock", tag="t", properties=TICK) != sent
            with pytest.raises(ClientError, match="another content"):
                official.send("shop", "orders", body="other", tag="t", properties=TICK)
            with pytest.raises(ClientError, match="DMQ_EVERY: a duration is expected"):
                official.send("shop", "orders", properties=TICK | {"DMQ_EVERY": "often"})
            official.start("billing", "simple", "orders", group="billing", wait_s=5, **SHOP.credentials)
            found = official.receive_until("billing", 2)
            assert {each["message_id"] for each in found}.isdisjoint({sent})
            assert sorted(each["properties"][OCCURRENCE] for each in found) == ["1", "2"]
            for each in found:
                assert (each["body"], each["tag"], each["properties"]["color"]) == ("tock", "t", "red")
                assert each["properties"].keys() == {"color", SCHEDULE, OCCURRENCE}
            official.start("reader", "producer", "orders", **READER.credentials)
            with pytest.raises(ClientError, match="PUB"):
                official.send("reader", "orders", properties=TICK | {"DMQ_SCHEDULE_NAME": "mine"})
        with AdminClient(daemon.address, signer=OPERATOR.signer()) as admin:
            (schedule,) = admin.schedules().schedules
            assert (schedule.name, schedule.topic, schedule.state, schedule.occurrences) == (
                "tick",
                "orders",
                "ended",
                2,
            )


def test_in_front_of_a_cluster(tmp_path: Path) -> None:
    """The schedule is here, its occurrences are at the cluster; another one of its name is refused."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await mine.send(
                [encode(Message("orders", b"tock", message_id=a_message("orders").message_id, properties=TICK))]
            )
            found = [decode(each.payload) for each in await receive(theirs, "orders", 2)]
            # The cluster is a daemon of ours, which takes DMQ_OCCURRENCE off every send.
            assert all(each.body == b"tock" and not each.deliver_at_ms for each in found)
            other = encode(Message("bills", b"x", message_id=a_message("bills").message_id, properties=TICK))
            with pytest.raises(Refused, match="another content") as caught:
                await mine.send([other])
            assert caught.value.rule is Rule.PROPERTY_KEY

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, tmp_path / "data") as front:
        began_ms = now_ms()
        play(scenario())
        assert now_ms() - began_ms >= 2_000
        with AdminClient(front.address) as admin:
            assert [each.name for each in admin.schedules().schedules] == ["tick"]
