"""What RocketMQ's own client 5.5.0 and its broker said to each other, read and made as they did it.

``tools/capture_remoting.py`` wrote it down.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker_adapter.contracts.classic import (
    Decision,
    Filter,
    Outgoing,
    Presence,
    QueueReceipt,
    ReceivedMessage,
    SendStatus,
    Start,
)
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import RemotingFrame, decode_frame, encode_frame
from broker_adapter.remoting.protocol.ids import decode_offset_id
from broker_adapter.remoting.protocol.packing import Compression, unpack
from broker_adapter.remoting.protocol.properties import decode_properties, encode_properties, to_message
from broker_adapter.remoting.protocol.requests.bodies import decode_locked, decode_members, heartbeat_body, lock_body
from broker_adapter.remoting.protocol.requests.pulling import pull_fields
from broker_adapter.remoting.protocol.requests.sending import (
    decode_batch,
    encode_item,
    receipt_of,
    send_back_fields,
    send_batch,
    send_one,
)
from broker_adapter.remoting.protocol.requests.transactions import end_fields

CAPTURED = Path(__file__).parents[3] / "golden" / "remoting"
FRAMES = {path.stem: decode_frame(path.read_bytes()) for path in sorted(CAPTURED.glob("*.bin"))}
SENDS = {name: frame for name, frame in FRAMES.items() if name.startswith("java-send-") and name[10:].isdigit()}
QUEUE = MessageQueue("frames", "broker-a", 0)


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("is_binary", [False, True])
def test_a_frame_comes_back_as_it_was(name: str, is_binary: bool) -> None:
    """In both forms of its header; Java orders its fields by chance."""
    assert decode_frame(encode_frame(FRAMES[name], is_binary=is_binary)[4:]) == FRAMES[name]


def test_all_kinds_are_there() -> None:
    """A folder without them would pass everything."""
    assert len(SENDS) == 8
    assert {name for name in FRAMES if name.startswith("broker-")} == {
        *("broker-asks-members-changed-1", "broker-lock", "broker-members", "broker-send", "broker-send-back"),
        "broker-send-batch",
    }


def again(frame: RemotingFrame, **more: Any) -> tuple[dict[str, str], bytes]:  # noqa: ANN401 - fields of an Outgoing
    """What we send for the message of a Java send: its fields but the properties, and its body."""
    properties, bits = decode_properties(frame.fields["i"].encode()), int(frame.fields["f"])
    body = unpack(frame.body, bits) if bits & 1 else frame.body
    message_id = properties["UNIQ_KEY"]
    message = to_message(
        "frames", body, properties, message_id=message_id, born_at_ms=int(frame.fields["g"]), born_host=""
    )
    outgoing = Outgoing(
        message=Message(
            message.topic,
            body,
            tag=message.tag,
            keys=message.keys,
            properties=message.properties,
            born_at_ms=message.born_at_ms,
            deliver_at_ms=int(properties.get("TIMER_DELIVER_MS", 0)),
        ),
        delay_level=int(properties.get("DELAY", 0)),
        is_half="TRAN_MSG" in properties,
    )
    method = Compression(bits >> 8) if bits >> 8 else Compression.ZLIB
    queue = QUEUE._replace(queue_id=int(frame.fields["e"]))  # Java chooses one for a half message itself
    send = send_one("frames-producer", queue, outgoing, message_id=message_id, now_ms=1, compression=method)
    fields = dict(send.fields)
    assert decode_properties(fields.pop("i").encode()) == properties
    assert (unpack(send.body, bits) if bits & 1 else send.body) == body
    return fields, body


@pytest.mark.parametrize("name", SENDS)
def test_a_send_is_ours_too(name: str) -> None:
    """Small, compressed in each way, delayed in both, one way, and half."""
    theirs = dict(SENDS[name].fields)
    text = theirs.pop("i").encode()
    assert encode_properties(decode_properties(text)) == text
    fields, body = again(SENDS[name])
    assert fields == theirs
    assert body == (b"0123456789" * 1000 if int(theirs["f"]) & 1 else SENDS[name].body)


def test_a_batch_is_ours_too() -> None:
    """To the byte, once it is taken apart and put together."""
    theirs = FRAMES["java-send-batch-1"]
    items = list(decode_batch(theirs.body))
    assert b"".join(encode_item(*each) for each in items) == theirs.body
    ids = [decode_properties(text)["UNIQ_KEY"] for _, text in items]
    batch = [Outgoing(message=Message("frames", body, tag="b")) for body, _ in items]
    ours = send_batch("frames-producer", QUEUE, batch, message_ids=ids, now_ms=int(theirs.fields["g"]))
    found = [(body, decode_properties(text)) for body, text in decode_batch(ours.body)]
    assert found == [(body, decode_properties(text)) for body, text in items]
    assert {**ours.fields, "i": ""} == {**theirs.fields, "i": ""}


def test_a_heartbeat_is_ours_too() -> None:
    """But for two fields that say nothing by default, and a producer that every Java client has inside."""
    theirs = json.loads(FRAMES["java-heartbeat-2"].body)
    (consumer,) = theirs["consumerDataSet"]
    versions = {each["topic"]: each["subVersion"] for each in consumer["subscriptionDataSet"]}
    presence = Presence(
        "frames-failing",
        {"%RETRY%frames-failing": Filter(), "frames": Filter("created || b")},
        start=Start.FIRST_OFFSET,
    )
    made = heartbeat_body(
        theirs["clientID"], ["CLIENT_INNER_PRODUCER"], [presence], lambda _, topic, __: versions[topic]
    )
    assert {**json.loads(made), "heartbeatFingerprint": 0, "withoutSub": False} == theirs


def test_a_pull_is_ours_too() -> None:
    """But for a bound that brokers have by themselves, and offsets that we commit apart."""
    theirs = dict(FRAMES["java-pull-1"].fields)
    queue = MessageQueue("frames", "broker-a", int(theirs["queueId"]))
    ours = pull_fields("frames-failing", queue, 0, batch_max=32, wait_ms=15_000, version=int(theirs["subVersion"]))
    assert {**ours, "maxMsgBytes": theirs["maxMsgBytes"], "commitOffset": "-1"} == {**theirs, "subscription": ""}


def test_locks_are_ours_too() -> None:
    """And what a broker says to them, and to a question for members."""
    theirs = json.loads(FRAMES["java-lock-1"].body)
    (named,) = theirs["mqSet"]
    queue = MessageQueue(named["topic"], named["brokerName"], named["queueId"])
    assert json.loads(lock_body("frames-orderly", theirs["clientId"], [queue])) == theirs
    assert decode_locked(FRAMES["broker-lock"].body) == {queue}
    assert len(decode_members(FRAMES["broker-members"].body)) == 1


def test_a_message_that_is_sent_back_is_ours_too() -> None:
    """By its place in the log."""
    theirs = FRAMES["java-send-back-1"].fields
    place = "7F00000100002A9F" + f"{int(theirs['offset']):016X}"
    message = Message("frames", b"one", message_id=theirs["originMsgId"])
    failed = ReceivedMessage(message=message, queue=QUEUE, queue_offset=4, stored_at_ms=1, offset_id=place)
    assert send_back_fields("frames-failing", failed, delay_level=0, attempts_max=2) == theirs


def test_the_end_of_a_transaction_is_ours_too() -> None:
    """With the place that the broker gave."""
    theirs = FRAMES["java-end-transaction-1"].fields
    place = "7F00000100002A9F" + f"{int(theirs['commitLogOffset']):016X}"
    message_id = theirs["msgId"]
    receipt = QueueReceipt(SendStatus.STORED, message_id, QUEUE, 0, place, theirs["transactionId"])
    assert end_fields("frames-producer", receipt, Decision.COMMIT, None) == theirs


@pytest.mark.parametrize(("name", "count"), [("broker-send", 1), ("broker-send-batch", 2)])
def test_receipts_of_a_broker_are_read(name: str, count: int) -> None:
    """Where it stored each message."""
    receipt = receipt_of(FRAMES[name], QUEUE, "M", "a:1")
    places = [decode_offset_id(each) for each in receipt.offset_id.split(",")]
    assert len(places) == count
    assert {each.host.partition(":")[0] for each in places} == {"127.0.0.1"}
