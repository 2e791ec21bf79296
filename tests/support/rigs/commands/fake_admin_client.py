"""The command line without a daemon: a client that answers by itself, and a way to run commands in process."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from google.protobuf.message import Message
from support.forges.wire.admin_status import STATUS
from support.rigs.commands.command_tree import keep
from typer.testing import CliRunner, Result

from broker_adapter.wire.pool import Method
from broker_adapter.wire.signature import Signer
from dmq.admin.client import client
from dmq.cli.app import app
from dmq.config.contexts import ClientTls


class FakeClient(client.AdminClient):
    """A client with fixed answers, by RPC; others are empty.

    ``failure`` is raised instead of every answer. For what a real daemon cannot show; ``live_cell`` is for the rest.
    """

    answers: ClassVar[dict[str, Message]]
    opened: ClassVar[list[tuple[str, float]]]
    signers: ClassVar[list[Signer | None]]
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
        self.signers.append(signer)
        self.opened.append((address, timeout_s))

    def close(self) -> None:
        """There is nothing to close."""

    def _call(self, method: Method, request: Message) -> Message:
        if self.failure is not None:
            raise self.failure
        return self.answers.get(method.name, method.response_class())


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """Put a fresh one in place of the real client; set its class attributes to change what it answers."""
    FakeClient.answers, FakeClient.failure = {"GetStatus": STATUS}, None
    FakeClient.opened, FakeClient.signers = [], []
    monkeypatch.setattr("dmq.admin.client.AdminClient", FakeClient)
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
