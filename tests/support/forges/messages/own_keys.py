"""Messages with an own key, and what the rows of a store say of those that wait."""

from __future__ import annotations

from support.rigs.broker.rig import TOPIC, EmbeddedRig

from broker_adapter.contracts.message import Envelope, Message, SendReceipt, unpack_id
from broker_adapter.contracts.own_keys import KEEP, ON_SAME_KEY, OWN_KEY
from broker_adapter.wire.mapping import encode
from dmq.store.schema.keys import (
    META_OWN_KEY,
    TIMELINE_END,
    Family,
    meta_id,
    meta_range,
    pack_index_prefix,
)
from dmq.store.schema.messages.own_keys import KeyHolder, decode_key_holder, own_key_of_row, row_of
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.store import Store

KEY = "invoice-7"
SOON_MS = 5_000


def keyed(
    message_id: str,
    at_ms: int = 0,
    *,
    key: str = KEY,
    keeps: bool = False,
    message_group: str = "",
    body: bytes = b"body",
    topic: str = TOPIC,
) -> Envelope:
    """A message with an own key, as a client sends it; at 0 it is not delayed."""
    properties = {OWN_KEY: key} | ({ON_SAME_KEY: KEEP} if keeps else {})
    return encode(
        Message(
            topic,
            body,
            message_id=message_id,
            properties=properties,
            message_group=message_group,
            deliver_at_ms=at_ms,
        )
    )


async def put(rig: EmbeddedRig, message_id: str, after_ms: int = SOON_MS, *, keeps: bool = False) -> SendReceipt:
    """Send one that is due some time from now; 0: at once."""
    at_ms = rig.clock.now_ms() + after_ms if after_ms else 0
    (receipt,) = await rig.broker.send([keyed(message_id, at_ms, keeps=keeps)])
    return receipt


def waiting_under_keys(store: Store) -> dict[str, str]:
    """Return which message waits under which own key; each entry and each row lead to one another."""
    rows = store.scan(Family.META, *meta_range(META_OWN_KEY), limit=10_000).rows
    said = {row: decode_key_holder(value) for row, value in rows}
    found: dict[bytes, KeyHolder] = {}
    for key, value in store.scan(Family.TIMELINE, b"", TIMELINE_END, limit=10_000).rows:
        if row := row_of(value):
            assert row not in found, "two wait under one key"
            entry = decode_waiting(value)
            message_id = said[row].message_id
            receipt = store.find(entry.scope, message_id)
            assert receipt is not None
            assert receipt.key == key
            found[row] = KeyHolder(receipt.sequence, entry.deliver_at_ms, len(value), message_id)
            assert store.get_many(Family.INDEX, [pack_index_prefix(0, meta_id(row)) + message_id])[0]
    assert found == said
    return {own_key_of_row(row).decode(): unpack_id(each.message_id) for row, each in said.items()}
