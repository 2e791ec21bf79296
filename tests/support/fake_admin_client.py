"""The command line without a daemon: a client that answers by itself, and a way to run commands in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import ClassVar, Self, TypeVar

import pytest
from support.admin_source import FixedSource
from typer.testing import CliRunner, Result

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.service import AdminService
from dmq.cli.app import app

OK = public.Status(code=public.OK)
_Response = TypeVar("_Response")


class FakeClient:
    """Answers from a fixed source, without a transport; remembers what it was asked."""

    source: ClassVar[FixedSource]
    sent: ClassVar[list[public.Message]]
    opened: ClassVar[list[tuple[str, float]]]
    send_status: ClassVar[public.Status]
    failure: ClassVar[Exception | None]

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.opened.append((address, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> wire.GetStatusResponse:
        return self._answer(AdminService(self.source).get_status(wire.GetStatusRequest()))

    def topics(self) -> wire.ListTopicsResponse:
        return self._answer(AdminService(self.source).list_topics(wire.ListTopicsRequest()))

    def message(self, topic: str, message_id: str, *, with_body: bool) -> wire.GetMessageResponse:
        request = wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body)
        return self._answer(AdminService(self.source).get_message(request))

    def send(self, message: public.Message) -> public.SendMessageResponse:
        if self.failure is not None:
            raise self.failure
        self.sent.append(message)
        entry = public.SendResultEntry(status=self.send_status, message_id=message.system_properties.message_id)
        return public.SendMessageResponse(status=self.send_status, entries=[entry])

    def _answer(self, call: Coroutine[object, object, _Response]) -> _Response:
        if self.failure is not None:
            call.close()
            raise self.failure
        return asyncio.run(call)


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """Put a fresh one in place of the real client; set its class attributes to change what it answers."""
    FakeClient.source, FakeClient.send_status, FakeClient.failure = FixedSource(), OK, None
    FakeClient.sent, FakeClient.opened = [], []
    monkeypatch.setattr("dmq.admin.client.AdminClient", FakeClient)
    return FakeClient


def run_dmq(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    """Run a command line in process."""
    return CliRunner().invoke(app, list(arguments), input=stdin, env=env)


def error_of(result: Result) -> dict[str, object]:
    """The machine-readable error of a command that was asked for JSON."""
    found = json.loads(result.stderr)["error"]
    assert isinstance(found, dict)
    return found
