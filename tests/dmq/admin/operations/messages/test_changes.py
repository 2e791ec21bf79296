"""What a call that changes delayed messages may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.rigs.commands.live_cell import NOW, LiveCell, live_cell

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.validate import ENTRIES_MAX


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCell]:
    with live_cell(tmp_path_factory.mktemp("cell") / "data") as live:
        live.run("msg", "send", "orders", "x", "--delay", "1h", "--id", "m")
        yield live


def asked(live: LiveCell, **fields: Any) -> wire.ChangeMessagesResponse:  # noqa: ANN401 - those of the request
    """The call."""
    found: wire.ChangeMessagesResponse = live.ask(wire.ChangeMessagesRequest(topic="orders", **fields))
    return found


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cancel": True}, "no message is named"),
        ({"message_ids": ["m"] * (ENTRIES_MAX + 1), "cancel": True}, "too many messages"),
        ({"message_ids": ["m"] * ENTRIES_MAX, "recall_handles": ["h"], "cancel": True}, "too many messages"),
        ({"message_ids": [" "], "cancel": True}, "blank or too long"),
        ({"own_keys": [" "], "cancel": True}, "not printable text, or is spaces alone"),
        ({"own_keys": ["k"] * ENTRIES_MAX, "message_ids": ["m"], "cancel": True}, "too many messages"),
        ({"message_ids": ["m"]}, "contains no change"),
        ({"message_ids": ["m"], "cancel": False}, "contains no change"),
        ({"message_ids": ["m"], "deliver_at_ms": 0}, "the delivery time is out of range"),
        ({"message_ids": ["m"], "deliver_at_ms": DELIVER_AT_MS_MAX + 1}, "the delivery time is out of range"),
        ({"recall_handles": ["x" * 3_000], "cancel": True}, "too long"),
        ({"message_ids": ["m"], "recall_handles": ["nonsense"], "cancel": True}, "not one of this store"),
    ],
)
def test_invalid_input_is_refused_as_a_whole(live: LiveCell, fields: dict[str, Any], why: str) -> None:
    """Nothing of it is done."""
    with pytest.raises(Refused, match=why):
        asked(live, **fields)
    assert asked(live, message_ids=["m"], deliver_at_ms=NOW + 3_600_000).messages[0].outcome == wire.ChangedMessage.DONE


def test_each_that_is_named_is_answered(live: LiveCell) -> None:
    """One answer for each name, in their order, also for an id or an own key that is named twice."""
    live.run("msg", "send", "orders", "x", "--delay", "1h", "--id", "twice", "--own-key", "twice")
    found = asked(
        live, message_ids=["m", "other", "m"], own_keys=["twice", "free", "twice"], deliver_at_ms=NOW + 3_600_000
    ).messages
    done, unknown = wire.ChangedMessage.DONE, wire.ChangedMessage.UNKNOWN
    assert [(each.message_id, each.own_key, each.outcome) for each in found] == [
        ("m", "", done),
        ("other", "", unknown),
        ("m", "", done),
        ("twice", "twice", done),
        ("", "free", unknown),
        ("twice", "twice", done),
    ]


def test_pending_messages_under_own_keys_are_changed(live: LiveCell) -> None:
    """After what was named otherwise, with the id of its message."""
    live.run("msg", "send", "orders", "x", "--delay", "1h", "--id", "n", "--own-key", "k")
    found = asked(live, own_keys=["k", "free"], message_ids=["m"], deliver_at_ms=NOW + 3_600_000).messages
    assert [(each.message_id, each.own_key, each.outcome) for each in found] == [
        ("m", "", wire.ChangedMessage.DONE),
        ("n", "k", wire.ChangedMessage.DONE),
        ("", "free", wire.ChangedMessage.UNKNOWN),
    ]
