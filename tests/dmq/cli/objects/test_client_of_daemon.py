"""``dmq client`` in front of a real daemon: who is there, and what one of them answers."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.clients.official.client import NODE, OfficialClient, require
from support.clients.wire.client import WireClient, a_message
from support.clients.wire.protocol import consumer_settings
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = pytest.mark.integration


@contextmanager
def answering(address: str, client_id: str) -> Iterator[threading.Event]:
    """A push consumer that answers what it is asked by what it is; the event tells when it is connected."""
    says: queue.SimpleQueue[wire.TelemetryCommand | None] = queue.SimpleQueue()
    is_connected = threading.Event()

    def serve(frames: Iterator[Any]) -> None:
        for frame in frames:
            match frame.WhichOneof("command"):
                case "settings":
                    is_connected.set()
                case "print_thread_stack_trace_command":
                    nonce = frame.print_thread_stack_trace_command.nonce
                    says.put(wire.TelemetryCommand(thread_stack_trace=wire.ThreadStackTrace(nonce="of nobody")))
                    trace = wire.ThreadStackTrace(nonce=nonce, thread_stack_trace="main:\n  serve()")
                    says.put(wire.TelemetryCommand(thread_stack_trace=trace))
                case "verify_message_command":
                    command = frame.verify_message_command
                    is_good = command.message.body == b"good"
                    status = wire.Status(code=wire.OK if is_good else wire.FAILED_TO_CONSUME_MESSAGE, message="said so")
                    result = wire.VerifyMessageResult(nonce=command.nonce)
                    says.put(wire.TelemetryCommand(status=status, verify_message_result=result))

    with WireClient(address, client_id) as client:
        says.put(consumer_settings())
        thread = threading.Thread(target=serve, args=(client.open("Telemetry", iter(says.get, None)),))
        thread.start()
        try:
            yield is_connected
        finally:
            says.put(None)
            thread.join(10)


def test_operators_can_ask_a_client(daemon: Daemon) -> None:
    """It is listed, shows its stack, and consumes a message that waits; what is not there is said."""

    def dmq(*arguments: str) -> tuple[int, str]:
        ran = run_command("--address", daemon.address, "client", *arguments)
        return ran.returncode, ran.stdout or ran.stderr

    with WireClient(daemon.address) as sender, answering(daemon.address, "asked") as is_connected:
        for body in (b"good", b"bad"):
            assert sender.send(a_message("orders", body.decode(), body)).status.code == wire.OK
        assert is_connected.wait(10)
        found = json.loads(dmq("ls", "-o", "json")[1])
        assert [(each["client_id"], each["kind"], each["group"], each["streams"]) for each in found] == [
            ("asked", "PUSH_CONSUMER", "billing", 1)
        ]
        assert dmq("stack", "asked") == (0, "main:\n  serve()\n")
        assert dmq("verify", "asked", "orders", "good") == (0, "asked consumed good\n")
        code, text = dmq("verify", "asked", "orders", "bad")
        assert (code, "60000 FAILED_TO_CONSUME_MESSAGE): said so" in text) == (1, True)
        for arguments in (("stack", "nobody"), ("verify", "asked", "orders", "unheard-of")):
            code, text = dmq(*arguments)
            assert (code, "not found" in text) == (3, True)
    daemon.stop()


def test_the_official_node_client_answers(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its own answer comes through; it says that it has no stack to show."""
    require(NODE)
    with OfficialClient(NODE, tmp_path_factory.mktemp("node"), daemon.address) as process:
        process.start("simple", "simple", "orders", group="readers")
        (found,) = json.loads(run_command("-a", daemon.address, "client", "ls", "-g", "readers", "-o", "json").stdout)
        assert (found["kind"], found["language"], found["streams"]) == ("SIMPLE_CONSUMER", "HTTP", 1)
        assert run_command("-a", daemon.address, "client", "stack", found["client_id"]).stdout == "mock stack\n"
    daemon.stop()
