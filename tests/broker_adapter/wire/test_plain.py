"""Wire messages as JSON values."""

from __future__ import annotations

from broker_adapter.wire.plain import to_plain
from dmq.admin import admin_v1 as wire


def test_json_has_every_key_with_plain_values() -> None:
    """Numbers stay numbers, enums become names, absent fields are null, maps are sorted."""
    message = wire.GetMessageResponse(topic="t", state=wire.WAITING, deliver_at_ms=2**53)
    assert to_plain(message) == {
        "topic": "t",
        "message_id": "",
        "state": "WAITING",
        "deliver_at_ms": 2**53,
        "stored_at_ms": 0,
        "queue_id": 0,
        "queue_offset": 0,
        "content": None,
        "is_held": False,
        "groups": [],
        "ended_at_ms": 0,
    }
    message.content.properties.update({"b": "2", "a": "1"})
    message.content.body = b"\x00\xff"
    content = to_plain(message)["content"]
    assert isinstance(content, dict)
    assert list(content["properties"]) == ["a", "b"]
    assert (content["body"], content["keys"]) == ("AP8=", [])


def test_a_state_of_a_newer_daemon_is_shown_as_its_number() -> None:
    """An older command line continues to work."""
    assert to_plain(wire.GetStatusResponse.FromString(b"\x28\x63"))["state"] == 99
