"""The command line without a daemon: a client that answers by itself, and a way to run commands in process."""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar, TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from support.admin_clients import FixedClients
from support.admin_source import FixedSource, service_over
from support.command_tree import keep
from typer.testing import CliRunner, Result

from broker_adapter.wire.pool import Method
from broker_adapter.wire.signature import Signer
from dmq.admin.api.service import handlers, refusal_of
from dmq.admin.client import client
from dmq.cli.app import app
from dmq.config.contexts import ClientTls

_Response = TypeVar("_Response", bound=Message)
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class FakeClient(client.AdminClient):
    """The real client and the real service with no transport between them, in front of a fixed source.

    ``failure`` is raised instead of every answer. For what a real daemon cannot show; ``live_cell`` is for the rest.
    """

    source: ClassVar[FixedSource]
    opened: ClassVar[list[tuple[str, float]]]
    signers: ClassVar[list[Signer | None]]
    deadlines: ClassVar[list[tuple[str, float]]]  # in seconds, of each call
    failure: ClassVar[Exception | None]

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        signer: Signer | None = None,
        tls: ClientTls | None = None,
        why: str = "",
    ) -> None:
        self._address, self._timeout_s, self._tls, self._why = address, timeout_s, tls, ()
        self.signers.append(signer)
        self.opened.append((address, timeout_s))

    def close(self) -> None:
        """There is nothing to close."""

    def _call(
        self, method: Method, request: Message, response_class: type[_Response], timeout_s: float | None = None
    ) -> _Response:
        if self.failure is not None:
            raise self.failure
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        FakeClient.deadlines.append((method.name, timeout_s))
        service = service_over(self.source)
        service.clients.attach(FixedClients())
        handler = handlers(service)[method.path]

        async def answer() -> Message:
            return await handler.call(handler.request_class.FromString(request.SerializeToString()))

        try:
            response = asyncio.run(answer())
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.is_ours:
                raise
            raise self._told(_STATUS[refusal.code], refusal.text, timeout_s) from None
        assert isinstance(response, response_class)
        return response


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """Put a fresh one in place of the real client; set its class attributes to change what it answers."""
    FakeClient.source, FakeClient.failure = FixedSource(), None
    FakeClient.opened, FakeClient.deadlines, FakeClient.signers = [], [], []
    monkeypatch.setattr("dmq.admin.client.client.AdminClient", FakeClient)
    return FakeClient


def run_dmq(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    """Run a command line in process."""
    keep()
    return CliRunner().invoke(app, list(arguments), input=stdin, env=env)


def error_of(result: Result) -> dict[str, object]:
    """The machine-readable error of a command that was asked for JSON."""
    found = json.loads(result.stderr)["error"]
    assert isinstance(found, dict)
    return found
