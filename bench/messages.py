"""Messages as the official Python client sends them: a body of 200 random bytes is 286 bytes on the wire."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import to_envelope

TOPIC = "bench-wire"  # ten letters: with it the message has 286 bytes
BODY_BYTES = 200
WIRE_BYTES = 286
HOUR_MS = 3_600_000


def sent_message(message_id: str, body: bytes, now_ms: int, deliver_at_s: int) -> wire.Message:
    """Return what ``rocketmq-python-client`` puts into a send; it knows whole seconds only."""
    message = wire.Message(topic=wire.Resource(name=TOPIC), body=body)
    system = message.system_properties
    system.message_id = message_id
    system.message_type = wire.DELAY
    system.born_timestamp.seconds = now_ms // 1000
    system.born_host = "10.0.0.12"
    system.body_encoding = wire.IDENTITY
    system.delivery_timestamp.seconds = deliver_at_s
    return message


def far_envelopes(count: int, clock: Clock, *, batch: int, is_scattered: bool = True) -> Iterator[list[Envelope]]:
    """Yield batches of messages due at random whole seconds, from 12 to 36 hours ahead; or all with one delay.

    Scattered is the dearer case: almost every message of a batch then counts in another minute's counter.
    """
    now_ms = clock.now_ms()
    prefix = os.urandom(8).hex().upper()
    randomly = random.Random(1)
    first_s = (now_ms + 12 * HOUR_MS) // 1000
    last_s = first_s + (24 * HOUR_MS // 1000 if is_scattered else 1)
    for first in range(0, count, batch):
        yield [
            envelope_of(f"01{prefix}{number:016X}", now_ms, randomly.randrange(first_s, last_s))
            for number in range(first, min(first + batch, count))
        ]


def envelope_of(message_id: str, now_ms: int, deliver_at_s: int) -> Envelope:
    """Return a message as the sidecar gives it to the broker."""
    message = sent_message(message_id, os.urandom(BODY_BYTES), now_ms, deliver_at_s)
    return to_envelope(message, deliver_at_ms=deliver_at_s * 1000)
