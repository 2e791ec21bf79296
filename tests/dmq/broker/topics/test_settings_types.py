"""Topics that take one type of message, and names that are not made by using them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import GROUP, EmbeddedRig, End, an_envelope, every_durable_broker, ids, play, receive

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope, MessageType
from broker_adapter.contracts.transactions import Half
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.topics.catalog import AutoCreate
from dmq.store.schema.topics.names import TopicSettings, decode_topic_settings, encode_topic_settings

pytestmark = pytest.mark.contract
LATER_MS = 4_000_000_000_000
SENT = {
    MessageType.NORMAL: an_envelope("normal"),
    MessageType.FIFO: an_envelope("fifo", message_group="g"),
    MessageType.DELAY: an_envelope("delay", message_group="g", deliver_at_ms=LATER_MS),
}


def to(topic: str, *envelopes: Envelope) -> list[Envelope]:
    return [envelope._replace(topic=topic) for envelope in envelopes]


@every_durable_broker(queues=2)
async def test_a_topic_takes_its_type_only(rig: EmbeddedRig) -> None:
    """Also after a restart; a mixed one takes all. The route says so, and nothing of a refused send is stored."""
    for wanted in MessageType:
        await rig.broker.catalog.make_topic(wanted.name, 3, TopicSettings(wanted))
    await rig.restart(End.KILL)
    for wanted in MessageType:
        assert await rig.broker.route(wanted.name) == (wanted.name, 3, (wanted,))
        for sent, envelope in SENT.items():
            if sent is wanted:
                await rig.broker.send(to(wanted.name, envelope))
                continue
            before = [*read_outbox(rig.store)]
            with pytest.raises(Refused, match=rf"accepts {wanted.name} messages only, got '{sent.name}'") as refused:
                await rig.broker.send(to(wanted.name, *(SENT[each] for each in SENT if each is wanted), envelope))
            assert refused.value.rule is Rule.MESSAGE_TYPE
            assert [*read_outbox(rig.store)] == before
        half = Half(an_envelope("half")._replace(topic=wanted.name))
        if wanted is MessageType.TRANSACTION:
            await rig.broker.transactions.prepare([half])
        else:
            with pytest.raises(Refused, match="got 'TRANSACTION'"):
                await rig.broker.transactions.prepare([half])
    await rig.broker.send([*SENT.values()])
    assert (await rig.broker.route("orders")).types == tuple(MessageType)


@every_durable_broker(queues=1)
async def test_groups_of_a_fifo_topic_get_ordered_delivery(rig: EmbeddedRig) -> None:
    """Before it holds anything: its type says what will be in it."""
    await rig.broker.catalog.make_topic("fifo", 0, TopicSettings(MessageType.FIFO))
    assert rig.broker.group_settings(GROUP, ["fifo"]).is_fifo


@pytest.mark.parametrize("name", ["make", "use"])
def test_names_are_not_made_by_using_them(tmp_path: Path, name: str) -> None:
    """When the configuration says so; what an operator makes is there, and the dead-letter queue of a known group."""
    rig = EmbeddedRig(tmp_path, on_disk=False)

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.broker.close()
        rig.broker = EmbeddedBroker(rig.store, auto_create=AutoCreate(topics=False, groups=False))
        if name == "make":
            await rig.broker.catalog.make_topic("orders")
            await rig.broker.catalog.make_group(GROUP)
            await rig.broker.ensure_group(GROUP)
            await rig.broker.send([an_envelope("m-1")])
            assert ids(await receive(rig)) == ["m-1"]
            assert (await rig.broker.route(f"%DLQ%{GROUP}")).queues == 1
            await rig.broker.transactions.prepare([Half(an_envelope("half"))])
        else:
            for call in (rig.broker.route("orders"), rig.broker.send([an_envelope()]), rig.broker.route("%DLQ%x")):
                with pytest.raises(Refused, match="topic_auto_create is off") as refused:
                    await call
                assert refused.value.rule is Rule.TOPIC_UNKNOWN
            for asked in (rig.broker.ensure_group(GROUP), receive(rig)):
                with pytest.raises(Refused, match="group_auto_create is off") as refused:
                    await asked
                assert refused.value.rule is Rule.GROUP_UNKNOWN
            assert not rig.broker.names.topics
            assert not rig.broker.names.groups

    asyncio.run(play(rig, scenario))


@pytest.mark.parametrize(
    "settings",
    [TopicSettings(), TopicSettings(MessageType.DELAY)],
)
def test_settings_are_read_as_they_were_written(settings: TopicSettings) -> None:
    """Whatever is left out."""
    assert decode_topic_settings(encode_topic_settings(settings)) == settings


@pytest.mark.parametrize("value", [b"", b"\x02{}", b"\x01[]", b'\x01{"type":"LITE"}'])
def test_settings_that_cannot_be_read_are_no_settings(value: bytes) -> None:
    """They never look like those of a mixed topic."""
    read: Callable[[bytes], TopicSettings] = decode_topic_settings
    with pytest.raises(ValueError, match=r".+"):
        read(value)
