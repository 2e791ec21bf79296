"""Masked contents of messages: by topic and field, in each answer, for each key but an admin key."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.forges.messages.letters import die, fail_again, set_policy
from support.rigs.commands.live_cell import LiveCell, live_cell
from support.rigs.daemon.acl import Key, write_acl

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope, Message
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire.mapping import encode
from dmq.acl.file import KeyFile
from dmq.acl.guard import Authenticator
from dmq.admin import admin_v1 as wire
from dmq.admin.api.dispatch import AdminDispatcher
from dmq.admin.api.redaction import MASKED_BYTES_MAX, Redaction
from dmq.admin.api.service import AdminService
from dmq.config.redaction import parse_redaction_rule

RULES = tuple(map(parse_redaction_rule, ("customers*", "orders:email", "orders:card.number")))
HOUR_MS = 3_600_000
CLOCK = ManualClock()
SECRET = b'{"id": 7, "email": "ann@example.com"}'
BOSS, READER, VIEWER, ON_CALL, SHOP = (Key(name, name) for name in ("boss", "reader", "viewer", "on-call", "shop"))
KEYS = """
[keys.boss]
secret = "boss"
role = "admin"
[keys.reader]
secret = "reader"
role = "viewer"
bodies = true
[keys.viewer]
secret = "viewer"
role = "viewer"
[keys.on-call]
secret = "on-call"
role = "operator"
bodies = true
topics = { "*" = "ADMIN" }
groups = { "*" = "ADMIN" }
[keys.shop]
secret = "shop"
topics = { "*" = "PUB|SUB" }
groups = { "*" = "SUB|ADMIN" }
"""


def masked(topic: str, body: bytes, **fields: Any) -> wire.Content:  # noqa: ANN401 - of a content
    content = wire.Content(body=body, body_bytes=len(body), **{"body_encoding": "IDENTITY"} | fields)
    Redaction(RULES).mask_content(topic, content)
    return content


def shown(value: object, topic: str = "orders") -> object:
    content = masked(topic, json.dumps(value).encode())
    return json.loads(content.body) if content.HasField("body") else "hidden"


def test_a_rule_of_a_topic_hides_its_bodies() -> None:
    """The size stays; other topics are unchanged."""
    hidden = masked("customers-eu", b"ann")
    assert (hidden.HasField("body"), hidden.body_bytes, hidden.masking) == (False, 3, wire.Content.BODY)
    other = masked("bills", b"ann")
    assert (other.body, other.masking) == (b"ann", wire.Content.MASKING_UNSPECIFIED)


def test_fields_are_masked_at_any_depth() -> None:
    """In objects and arrays, in any letter case, with everything in them."""
    assert shown({"email": 1, "to": [{"EMail": None}, [{"email": {"a": "ann"}}]], "emails": 2}) == {
        "email": "***",
        "to": [{"EMail": "***"}, [{"email": "***"}]],
        "emails": 2,
    }


def test_a_path_names_fields_inside_of_each_other() -> None:
    """Each directly inside of the one before; arrays in between do not count."""
    cards = [{"number": 1, "name": "a"}, {"front": {"number": 2}}]
    assert shown({"number": 3, "card": cards, "old": {"Card": {"Number": 4}}}) == {
        "number": 3,
        "card": [{"number": "***", "name": "a"}, {"front": {"number": 2}}],
        "old": {"Card": {"Number": "***"}},
    }


def test_a_body_without_a_masked_field_is_unchanged() -> None:
    """Byte for byte."""
    body = b'{ "total": 1.10, "note": "caf\\u00e9" }'
    content = masked("orders", body)
    assert (content.body, content.masking) == (body, wire.Content.MASKING_UNSPECIFIED)


@pytest.mark.parametrize(
    "body",
    [
        b"email=ann@example.com",
        b'{"email": "ann@example.com"',
        b'"email: ann@example.com"',
        b"7",
        b"",
        '{"email": 1}'.encode("utf-16"),
        b'\xef\xbb\xbf{"email": 1}',
        b'{"a": {"email": "ann"}, "a": 1}',
        b'{"total": NaN, "email": 1}',
        b'{"email": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"total": 1' + b"0" * 5_000 + b"}",
        json.dumps({"text": "x" * MASKED_BYTES_MAX}).encode(),
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_a_body_whose_fields_are_uncertain_is_hidden(body: bytes) -> None:
    """No JSON, broken, no object, another encoding, a repeated name, too deep, too large: none of it is shown."""
    content = masked("orders", body)
    assert (content.HasField("body"), content.masking) == (False, wire.Content.BODY)


def test_a_compressed_body_is_hidden() -> None:
    """The daemon never unpacks a body."""
    content = masked("orders", gzip.compress(SECRET), body_encoding="GZIP")
    assert (content.HasField("body"), content.masking) == (False, wire.Content.BODY)


def test_properties_are_masked_by_a_single_name() -> None:
    """Also where no body was read; a path is about bodies only."""
    content = wire.Content(properties={"E-Mail": "a", "EMAIL": "ann", "number": "4", "color": "red"})
    Redaction(RULES).mask_content("orders", content)
    assert content.properties == {"E-Mail": "a", "EMAIL": "***", "number": "4", "color": "red"}
    assert content.masking == wire.Content.FIELDS


@pytest.mark.parametrize("topic", ["%DLQ%billing", "%RETRY%billing", ""])
def test_all_rules_apply_where_messages_of_any_topic_are(topic: str) -> None:
    """The queues of a group hold messages of each topic that it reads."""
    assert masked(topic, SECRET).masking == wire.Content.BODY


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCell]:
    """A daemon that masks, with a message of ``SECRET`` at each place where one can be."""
    with live_cell(tmp_path_factory.mktemp("cell") / "data") as live:
        rig = live.rig

        def secret(message_id: str, deliver_at_ms: int = 0) -> Envelope:
            properties = {"email": "ann@example.com"}
            return encode(
                Message(
                    topic="orders",
                    message_id=message_id,
                    body=SECRET,
                    properties=properties,
                    deliver_at_ms=deliver_at_ms,
                )
            )

        async def fill() -> None:
            await set_policy(rig, 3, HOUR_MS, group="billing")
            await die(rig, secret("D0"), group="billing")
            await rig.broker.send([secret("R0")])
            await fail_again(rig, group="billing")
            await rig.broker.send([secret("waiting", rig.clock.now_ms() + HOUR_MS), secret("queued")])

        live.ask(wire.CreateTopicRequest(topic="orders"))
        live.ask(wire.SetTopicRequest(topic="orders", index_properties=["email"]))
        live.do(fill())
        content = wire.Content(body=SECRET, properties={"email": "ann@example.com"})
        live.ask(
            wire.AddScheduleRequest(
                schedule=wire.Schedule(name="hourly", topic="orders", interval_ms=HOUR_MS, content=content)
            )
        )
        yield live


Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def serve(live: LiveCell, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Call as a key, or without access keys as ``None``."""
    cell = replace(live.cell, config=live.cell.config.model_copy(update={"redact": RULES}))
    service = AdminService(cell)
    guard = Authenticator(KeyFile(write_acl(tmp_path_factory.mktemp("acl"), KEYS), CLOCK), CLOCK)
    guarded, open_to_all = AdminDispatcher(service, guard), AdminDispatcher(service)

    def call(key: Key | None, rpc: str, request: Any) -> Any:  # noqa: ANN401 - its response
        method, header = wire.METHODS[rpc], dict(key.signer(CLOCK).metadata()) if key is not None else {}
        dispatcher = open_to_all if key is None else guarded
        answer = live.do(dispatcher.serve(method.path, request.SerializeToString(), header.get, "loopback"))
        return method.response_class.FromString(answer)

    return call


READINGS = {
    "GetMessage": wire.GetMessageRequest(topic="orders", message_id="waiting", with_body=True),
    "PeekMessages": wire.PeekMessagesRequest(topic="orders", queue_id=0, limit=10, with_body=True),
    "ListDeadLetters": wire.ListDeadLettersRequest(group="billing", limit=10, with_body=True),
    "GetSchedule": wire.GetScheduleRequest(name="hourly", with_body=True),
}
LISTS = {
    "ListMessages": wire.ListMessagesRequest(topic="orders", limit=10),
    "ListRetries": wire.ListRetriesRequest(group="billing", limit=10),
    "FindMessages": wire.FindMessagesRequest(topic="orders", property="email", value="ann@example.com", limit=10),
}


@pytest.mark.parametrize("rpc", [*READINGS, *LISTS])
def test_no_answer_has_a_masked_value(serve: Serve, rpc: str) -> None:
    """Of any call that returns contents, whatever the key: an admin key sees them on request only."""
    for key in (READER, ON_CALL, SHOP, BOSS, None):
        answer = str(serve(key, rpc, (READINGS | LISTS)[rpc]))
        assert ("ann@example.com" in answer, "***" in answer) == (False, True), key


@pytest.mark.parametrize("rpc", READINGS)
def test_an_admin_key_reads_unmasked_on_request(serve: Serve, rpc: str) -> None:
    """So does a caller of a daemon without access keys; it is recorded each time it is another reading."""
    request: Any = type(READINGS[rpc])()
    request.CopyFrom(READINGS[rpc])
    request.unmasked = True
    for other in (READER, ON_CALL, SHOP, VIEWER):
        with pytest.raises(Refused) as refused:
            serve(other, rpc, request)
        assert refused.value.rule is Rule.FORBIDDEN
    for key in (BOSS, None):
        serve(key, rpc, READINGS[rpc])  # a masked reading before does not hide the unmasked one
        assert "ann@example.com" in str(serve(key, rpc, request))
        (newest,) = serve(key, "ListActivity", wire.ListActivityRequest(limit=1)).activities
        assert (newest.rpc, newest.key) == (rpc, "boss" if key is BOSS else "")
        assert "unmasked=True" in newest.what


def test_unmasked_properties_are_a_recorded_reading(serve: Serve) -> None:
    """Also without the body."""
    request = wire.GetMessageRequest(topic="orders", message_id="queued", unmasked=True)
    with pytest.raises(Refused):
        serve(READER, "GetMessage", request)
    assert "ann@example.com" in str(serve(BOSS, "GetMessage", request))
    (newest,) = serve(BOSS, "ListActivity", wire.ListActivityRequest(limit=1)).activities
    assert "message_id=queued unmasked=True" in newest.what


def test_dead_letter_queues_are_masked_as_topics(serve: Serve) -> None:
    """They can be read as topics, and hold messages of any topic."""
    request = wire.PeekMessagesRequest(topic="%DLQ%billing", queue_id=0, limit=10, with_body=True)
    (found,) = serve(BOSS, "PeekMessages", request).messages
    assert (found.content.HasField("body"), found.content.masking) == (False, wire.Content.BODY)


def test_commands_show_masks(live: LiveCell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command names the rule and the option; with it the whole body is shown, and the export has it."""
    monkeypatch.setattr(live.admin, "redaction", Redaction(RULES))
    result = live.run("msg", "get", "orders", "waiting", "--body")
    assert '"email": "***"' in result.stdout
    assert "by a rule of the daemon (redact); --unmasked shows it to an admin key" in result.stdout
    assert "ann@example.com" in live.run("msg", "get", "orders", "waiting", "--body", "--unmasked").stdout
    exported = live.run("dead", "export", "billing", "--out", str(tmp_path / "masked"))
    assert "1 of 1 are masked by rules of the daemon (redact)" in exported.stderr
    assert json.loads((tmp_path / "masked").read_text())["content"]["masking"] == "FIELDS"
    assert live.run("dead", "export", "billing", "--out", str(tmp_path / "all"), "--unmasked").stderr == ""
    assert json.loads((tmp_path / "all").read_text())["content"]["masking"] is None
