"""One frame of each kind, and their bytes: ``python FILE > tests/golden/processes/frames.json`` writes them anew."""

from __future__ import annotations

import json
import sys
from typing import Any

from broker_adapter.contracts.message import DeadLetterFacts, Delivery, Envelope, SendReceipt
from dmq.acl.quotas import Holder
from dmq.metrics.counting import CallsTaken
from dmq.processes import frames
from dmq.processes.settings import RelayedMethod, Settings, TlsFiles

HOLDERS = (Holder("key", "shop"), Holder("address", "192.0.2.7"))
ENVELOPE = Envelope("orders", "m-1", b"payload", "tag", "group", 7_000, True, 3, 8_000, "own", True)
FACTS = DeadLetterFacts("orders", "m-1", 4, "gave up", 5_000, 6_000)
DELIVERY = Delivery("orders", "m-1", b"payload", 3, 12, "handle", 2, 30_000, 4_000, 5_000, FACTS, "group")
RECEIPT = SendReceipt("m-1", 3, 12, True, "recall", 9_000)
SETTINGS = Settings(
    log_level="info",
    log_format="json",
    delay_levels_ms=(1_000, 5_000),
    delay_max_ms=None,
    broker_name="broker",
    sends_in_flight_max=1_000,
    sends_busy=500,
    connections=100,
    connections_per_address=10,
    idle_s=60.0,
    request_s=30.0,
    bytes_held=2**28,
    bytes_reserve=2**25,
    limits=b"\1[]",
    shares=3,
    acl="/etc/dmq/keys.toml",
    tls=TlsFiles("cert.pem", "key.pem", None),
    plain_served_to="loopback",
    host="127.0.0.1",
    relayed=[RelayedMethod("/a.B/C", "unary", True)],
    wall_less_boot_ms=1_700_000_000_000,
)

FROM_FRONT: tuple[frames.Frame, ...] = (
    frames.Hello("1.2.3"),
    frames.Ready(),
    frames.SendMessages(1, [ENVELOPE], HOLDERS, 1_700_000_000_000),
    frames.ReceiveMessages(2, "client", HOLDERS, "workers", "orders", -1, ["red"], "a > 1", 32, 30_000, 20_000, True),
    frames.Taken(2),
    frames.NotTaken(2, False),
    frames.Ack(3, "workers", "orders", ["handle"]),
    frames.ChangeInvisible(4, "workers", "orders", "handle", 30_000, True, "client", "192.0.2.7"),
    frames.Relay(5, "/a.B/C", ["x-mq-client-id"], [b"\6client"], "ipv4:192.0.2.7:1", "192.0.2.7", 2.5, 12, b"body"),
    frames.StreamMessage(5, b"body"),
    frames.HalfClose(5),
    frames.More(5),
    frames.Cancel(5),
    frames.Left(["192.0.2.7"]),
    frames.Figures([CallsTaken("SendMessage", {20_000: 3}, [1, 2], 0.5, 0.25)], 3, 4, [(HOLDERS[0], 12)], 1.5, 2**20),
    frames.Pong(6),
)
FROM_STORE: tuple[frames.Frame, ...] = (
    frames.Welcome(SETTINGS),
    frames.Sent(1, [RECEIPT]),
    frames.DeliveredMessages(2, [DELIVERY, DELIVERY._replace(dead_letter=None)]),
    frames.Acked(3, [None, frames.Failure("refused", "it is another's", "RECEIPT_HANDLE", "handle")]),
    frames.Hidden(4, "handle"),
    frames.Failed(4, frames.Failure("overloaded", "sends in flight", limit=1_000, code=7)),
    frames.Piece(5, [b"one", b"two"]),
    frames.End(5, 8, "too much"),
    frames.Time(1_700_000_000_000),
    frames.OperatorLimits(b"\1[]"),
    frames.Listening("127.0.0.1", 8081),
    frames.Ping(6),
    frames.Read(5),
    frames.DrainFront(2.5),
)
DECODERS: tuple[tuple[Any, tuple[frames.Frame, ...]], ...] = (
    (frames.from_front, FROM_FRONT),
    (frames.from_store, FROM_STORE),
)


def frame_bytes() -> dict[str, str]:
    """Return a batch of one frame in hex, by the name of its kind."""
    return {type(each).__name__: frames.encode([each]).hex() for each in (*FROM_FRONT, *FROM_STORE)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(frame_bytes(), indent=1) + "\n")
