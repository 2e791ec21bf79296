"""``dmq msg``: single messages."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.message_id import new_message_id
from dmq.cli import output as out
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of
from dmq.cli.times import After, At, parse_when
from dmq.units import parse_duration

if TYPE_CHECKING:
    from broker_adapter.wire import rocketmq_v2 as public
    from dmq.admin import admin_v1 as wire

# What the public protocol's codes mean for a script; the rest is a failure.
_NOT_FOUND_CODES = range(40400, 40500)
_NOT_ALLOWED_CODES = frozenset({40100, 40300})
_LATER_CODES = range(42900, 43000)


def send(
    ctx: typer.Context,
    *,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where to.")],
    body: Annotated[str, typer.Argument(metavar="BODY", help="The body; - reads it from stdin.")],
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Deliver at: RFC 3339, epoch milliseconds, or +5m.")
    ] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Deliver after: 5m, 1h30m.")] = None,
    level: Annotated[int | None, typer.Option(min=1, help="Deliver after this delay level.")] = None,
    tag: Annotated[str, typer.Option(help="Filter word.")] = "",
    key: Annotated[list[str] | None, typer.Option(help="Lookup word; may be repeated.")] = None,
    group: Annotated[str, typer.Option(help="Message group: those of one group keep their order.")] = "",
    prop: Annotated[
        list[str] | None, typer.Option("--property", metavar="KEY=VALUE", help="User property; may be repeated.")
    ] = None,
    message_id: Annotated[
        str | None, typer.Option("--id", help="Message id; a send repeated with the same id is stored once.")
    ] = None,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Send one message and print its id."""
    session = session_of(ctx, address, output, timeout)
    due = _due(at, delay, level)
    properties = _properties(prop or [])
    payload = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    from broker_adapter.clock import SystemClock
    from broker_adapter.wire import rocketmq_v2 as public
    from broker_adapter.wire.mapping import set_timestamp

    now_ms = SystemClock().now_ms()
    message_id = message_id or new_message_id(now_ms, os.getpid(), secrets.token_bytes(10))
    message = public.Message(topic=public.Resource(name=topic), user_properties=properties, body=payload)
    system = message.system_properties
    system.message_id = message_id
    system.keys.extend(key or [])
    system.body_encoding = public.IDENTITY
    set_timestamp(system.born_timestamp, now_ms)
    system.message_type = public.FIFO if group else public.NORMAL
    if tag:
        system.tag = tag
    if group:
        system.message_group = group
    _delay(message, due)
    with session.connect() as client:
        try:
            response = client.send(message)
        except Exception as error:
            if getattr(error, "retriable", False):
                text = f"{error} (if in doubt, repeat with --id {message_id})"
                raise CommandFailed(text, ExitCode.UNAVAILABLE) from error
            raise
    entry = response.entries[0] if response.entries else None
    _check(entry.status if entry is not None else response.status)
    if not session.as_json:
        typer.echo(message_id)
        return
    recall_handle = entry.recall_handle if entry is not None else ""
    out.show_json({"topic": topic, "message_id": message_id, "recall_handle": recall_handle or None})


def get(
    ctx: typer.Context,
    *,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic it was sent to.")],
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Its message id.")],
    body: Annotated[bool, typer.Option("--body", help="Show the body as well (base64 in JSON).")] = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show where a message is, and what it is."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = client.message(topic, message_id, with_body=body)
    plain = out.to_plain(found)
    if plain["state"] == "UNKNOWN":
        text = f"message {message_id} is not known in topic {topic}: never sent there, or forgotten since"
        raise CommandFailed(out.printable(text), ExitCode.NOT_FOUND)
    if session.as_json:
        out.show_json(plain)
    else:
        out.show_facts([("state", str(plain["state"]).lower()), *_message_facts(found)])


def recall(
    ctx: typer.Context,
    *,
    handle: Annotated[str, typer.Argument(metavar="HANDLE", help="The recall handle that its send answered.")],
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Take a delayed message back before it is delivered, and print its id."""
    session = session_of(ctx, address, output, timeout)
    from broker_adapter.errors import Refused
    from dmq.embedded.recall import decode_recall

    try:
        topic = decode_recall(handle).topic
    except Refused as refused:
        raise typer.BadParameter(refused.why, param_hint="HANDLE") from refused
    with session.connect() as client:
        response = client.recall(topic, handle)
    _check(response.status)
    is_repeated = response.status.message != "OK"
    if session.as_json:
        out.show_json({"topic": topic, "message_id": response.message_id, "recalled_before": is_repeated})
        return
    typer.echo(response.message_id)
    if is_repeated:
        typer.echo(f"dmq: {out.printable(response.status.message)}", err=True)


def _due(at: str | None, delay: str | None, level: int | None) -> At | After | int | None:
    if sum(option is not None for option in (at, delay, level)) > 1:
        raise typer.BadParameter("give one of them only", param_hint="--at, --delay, --level")
    try:
        if at is not None:
            return parse_when(at)
        if delay is not None:
            return After(parse_duration(delay))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--at" if at is not None else "--delay") from error
    return level


def _delay(message: public.Message, due: At | After | int | None) -> None:
    from broker_adapter.wire import rocketmq_v2 as public
    from broker_adapter.wire.mapping import set_timestamp

    match due:
        case At(epoch_ms):
            set_timestamp(message.system_properties.delivery_timestamp, epoch_ms)
            message.system_properties.message_type = public.DELAY
        case After(delay_ms):
            message.user_properties["TIMER_DELAY_MS"] = str(delay_ms)
        case int():
            message.user_properties["DELAY"] = str(due)


def _properties(texts: list[str]) -> dict[str, str]:
    properties: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"KEY=VALUE is expected, not {text!r}", param_hint="--property")
        properties[name] = value
    return properties


def _check(status: public.Status) -> None:
    from broker_adapter.wire import rocketmq_v2 as public

    if status.code == public.OK:
        return
    text = f"refused: {status.message} ({int(status.code)})"
    if status.code in _NOT_FOUND_CODES:
        raise CommandFailed(text, ExitCode.NOT_FOUND)
    if status.code in _NOT_ALLOWED_CODES:
        raise CommandFailed(text, ExitCode.NOT_ALLOWED)
    raise CommandFailed(text, ExitCode.UNAVAILABLE if status.code in _LATER_CODES else ExitCode.FAILURE)


def _message_facts(found: wire.GetMessageResponse) -> list[tuple[str, str]]:
    content = found.content if found.HasField("content") else None
    facts = [
        ("topic", found.topic),
        ("message id", found.message_id),
        ("deliver at", out.when(found.deliver_at_ms)),
        ("stored at", out.when(found.stored_at_ms)),
        ("queue", f"{found.queue_id}, offset {found.queue_offset}" if found.queue_id >= 0 else ""),
    ]
    if content is None:
        return facts
    encoding = f", {content.body_encoding.lower()}" if content.body_encoding != "IDENTITY" else ""
    return [
        *facts,
        ("tag", content.tag),
        ("keys", " ".join(content.keys)),
        ("message group", content.message_group),
        ("properties", " ".join(f"{name}={value}" for name, value in sorted(content.properties.items()))),
        ("born", " on ".join(filter(None, (out.when(content.born_at_ms), content.born_host)))),
        ("body size", f"{content.body_bytes} B{encoding}"),
        ("body", out.body_text(content.body) if content.HasField("body") else ""),
    ]
