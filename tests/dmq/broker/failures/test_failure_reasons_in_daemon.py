"""Why messages failed: reported by consumers, kept by a real daemon with and without fronts, shown by its commands."""

# ruff: noqa: ANN401 - JSON

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.clients.wire.client import WireClient, a_receive
from support.rigs.daemon.process import Daemon, free_port, run_command

from broker_adapter.contracts.classic import ReceivedMessage
from broker_adapter.queue_client.client import connect
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.client import SidecarClient
from retry.failure_reason import NOT_REPORTED
from retry.sink import Death, Entry

pytestmark = pytest.mark.integration
_PROGRAM = Path(__file__).parents[3] / "clients" / "python" / "consume_app.py"
_SOON_S = 60.0


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "fronts"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that each test leaves running."""
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", processes=request.param) as served:
        yield served


def _dmq(daemon: Daemon, *words: str) -> str:
    done = run_command(*words, "--address", daemon.address)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _json(daemon: Daemon, *words: str) -> Any:
    return json.loads(_dmq(daemon, *words, "-o", "json"))


def _until(look: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + _SOON_S
    while not (found := look()):
        assert time.monotonic() < until_s
        threading.Event().wait(0.5)  # each look is a command
    return found


def _letter(daemon: Daemon, group: str, message_id: str) -> dict[str, Any]:
    """Return a dead letter once it is there."""

    def look() -> Any:
        return next((each for each in _json(daemon, "dead", "ls", group) if each["message_id"] == message_id), None)

    found: dict[str, Any] = _until(look)
    return found


def _group_state(daemon: Daemon, topic: str, message_id: str) -> dict[str, Any] | None:
    groups = _json(daemon, "msg", "get", topic, message_id)["groups"]
    return groups[0] if groups and groups[0]["failure"] else None


def _topic(daemon: Daemon, name: str, *policy: str) -> str:
    """Make a group of the same name as its topic, and return the name."""
    _dmq(daemon, "group", "set-policy", name, *policy)
    return name


@contextmanager
def _consuming(daemon: Daemon, topic: str, home: Path) -> Iterator[None]:
    with (home / "stderr.txt").open("ab") as errors:
        app = subprocess.Popen(
            [sys.executable, str(_PROGRAM), json.dumps({"topic": topic, "timeout_s": 1.0})],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"HOME": str(home), "DMQ_ADDRESS": daemon.address, "LISTEN": f"127.0.0.1:{free_port()}"},
        )
    try:
        yield
    finally:
        app.kill()
        app.communicate()


def test_a_consumer_reports_the_exception_of_its_handler(daemon: Daemon, tmp_path: Path) -> None:
    """``@consume``: a retry, a dead letter, ``Permanent`` and a timeout have the error, the host and the client."""
    topic = _topic(daemon, "orders", "--fixed", "1s", "--max-attempts", "2")
    slow = _topic(daemon, "slow-orders", "--fixed", "1h", "--max-attempts", "2")
    ids = {body: _dmq(daemon, "msg", "send", topic, body) for body in ("fail 9", "bad", "hang 1")}
    waits = _dmq(daemon, "msg", "send", slow, "fail 9")
    with _consuming(daemon, topic, tmp_path):
        failed = _letter(daemon, topic, ids["fail 9"])["failure"]
        permanent = _letter(daemon, topic, ids["bad"])["failure"]
    with _consuming(daemon, slow, tmp_path):
        state = _until(lambda: _group_state(daemon, slow, waits))
    assert (failed["error_type"], failed["error_text"]) == ("RuntimeError", "it says so")
    assert (failed["host"], failed["address"]) == (socket.gethostname(), "loopback")
    assert socket.gethostname() in failed["client_id"]
    assert (permanent["error_type"], permanent["error_text"]) == ("Permanent", "it says so")
    assert (state["state"], state["failure"]["error_type"]) == ("RETRYING", "RuntimeError")
    assert state["failed_at_ms"] > 0
    assert "error" in (shown := _dmq(daemon, "dead", "show", topic, ids["fail 9"]))
    assert "RuntimeError: it says so" in shown
    assert f"host {socket.gethostname()}" in shown
    assert "RuntimeError: it says so" in _dmq(daemon, "msg", "get", slow, waits)
    (retry,) = _json(daemon, "retry", "ls", slow)
    assert retry["failure"]["error_text"] == "it says so"
    errors = _json(daemon, "dead", "ls", topic, "--by-error")
    assert {each["error"]: each["count"] for each in errors} == {
        "RuntimeError: it says so": 1,
        "Permanent: it says so": 1,
    }
    assert "RuntimeError: it says so" in _dmq(daemon, "dead", "ls", topic, "--by-error")


def test_a_queue_client_reports_the_exception_of_its_handler(daemon: Daemon) -> None:
    """A consumer of ``broker_adapter.connect``: the error is with the dead letter."""
    topic = _topic(daemon, "queue-client", "--fixed", "1s", "--max-attempts", "1")
    message_id = _dmq(daemon, "msg", "send", topic, "body")

    async def consume() -> dict[str, Any]:
        async with await connect(f"rocketmq://{daemon.address}") as client:

            @client.consumer(topic, {topic: "*"})
            async def handle(batch: Sequence[ReceivedMessage]) -> None:
                raise LookupError("no courier")

            return await asyncio.to_thread(_letter, daemon, topic, message_id)

    failure = asyncio.run(consume())["failure"]
    assert (failure["error_type"], failure["error_text"]) == ("LookupError", "no courier")


def test_the_hook_reports_why_a_send_failed(daemon: Daemon) -> None:
    """The sink of the hook: while the entry waits, and once it is dead."""
    held_type = "shop"
    with SidecarClient(daemon.address) as client:
        now_ms = client.clock.now_ms()
        entry = Entry(type_name=held_type, uid=b"u" * 16, payload=b"p", created_at_ms=now_ms, due_at_ms=now_ms)
        client.put(entry).result(_SOON_S)
        (held,) = client.take(held_type, 1, _SOON_S)
        hold: Any = held.ticket
        topic, message_id = f"redelivery_{held_type}", hold.message_id
        client.again(held, client.clock.now_ms() + 1_500, is_counted=True, error="OSError: no route").result(_SOON_S)
        state = _until(lambda: _group_state(daemon, topic, message_id))
        assert (state["state"], state["failure"]["error_text"]) == ("LEASED", "OSError: no route")
        (held,) = client.take(held_type, 1, _SOON_S)
        client.bury(held, Death.PERMANENT, "OSError: refused").result(_SOON_S)
        letter = _letter(daemon, "redelivery", message_id)
    assert letter["failure"]["error_text"] == "OSError: refused"


def _received(client: WireClient, topic: str) -> wire.Message:
    request = a_receive(topic, topic, wait_s=20)
    request.auto_renew = True
    frames = client.frames("ReceiveMessage", request, deadline_s=30)
    found: wire.Message = next(frame.message for frame in frames if frame.HasField("message"))
    return found


def _nack(client: WireClient, topic: str, message: wire.Message) -> None:
    request = wire.ChangeInvisibleDurationRequest(receipt_handle=message.system_properties.receipt_handle)
    request.group.name, request.topic.name = topic, topic
    request.invisible_duration.seconds = 1
    assert client.ask("ChangeInvisibleDuration", request).status.code == wire.OK


def _report(client: WireClient, group: str, handle: str, text: str, kind: str = "Error") -> int:
    method = consumer_v1.METHODS["ReportFailure"]
    call = client.channel.unary_unary(
        method.path, consumer_v1.ReportFailureRequest.SerializeToString, consumer_v1.ReportFailureResponse.FromString
    )
    request = consumer_v1.ReportFailureRequest(group=group, receipt_handle=handle, error_type=kind, error_text=text)
    code: int = call(request, timeout=30, metadata=client._metadata).status.code
    return code


def test_a_client_that_reports_nothing_is_named(daemon: Daemon) -> None:
    """Of any other client: that it gave no reason, its client id, its address and the time."""
    topic = _topic(daemon, "silent", "--fixed", "1s", "--max-attempts", "1")
    message_id = _dmq(daemon, "msg", "send", topic, "body")
    client = WireClient(daemon.address, client_id="a-go-client")
    with client.channel:
        _nack(client, topic, _received(client, topic))
    letter = _letter(daemon, topic, message_id)
    assert letter["failure"] == {
        **dict.fromkeys(("error_type", "error_text", "host"), ""),
        "client_id": "a-go-client",
        "address": "loopback",
    }
    shown = _dmq(daemon, "dead", "show", topic, message_id)
    assert NOT_REPORTED in shown
    assert "a-go-client, address loopback" in shown
    assert NOT_REPORTED in _dmq(daemon, "dead", "ls", topic, "--by-error")


def test_a_reported_reason_is_escaped_and_bounded(daemon: Daemon) -> None:
    """Control characters reach no terminal; a report of an unknown delivery is OK and keeps nothing."""
    topic = _topic(daemon, "hostile", "--fixed", "1s", "--max-attempts", "1")
    message_id = _dmq(daemon, "msg", "send", topic, "body")
    client = WireClient(daemon.address, client_id="hostile")
    with client.channel:
        message = _received(client, topic)
        handle = message.system_properties.receipt_handle
        assert _report(client, topic, "no handle", "lost") == wire.OK
        assert _report(client, "nobody", handle, "of another group") == wire.OK
        assert _report(client, topic, handle, "\x1b[2J<script>\n" + "x" * 5_000) == wire.OK
        _nack(client, topic, message)
    failure = _letter(daemon, topic, message_id)["failure"]
    assert failure["error_text"].startswith("\\x1b[2J<script>\\nxxx")
    assert len(failure["error_text"]) == 1024
    assert "\x1b" not in _dmq(daemon, "dead", "show", topic, message_id)


def test_switched_off_nothing_is_kept(tmp_path: Path) -> None:
    """``failure_reasons = off``: the report is refused as not supported, and no client is named."""
    env = os.environ | {"DMQ_FAILURE_REASONS": "off"}
    with Daemon(tmp_path / "data", env=env) as daemon:
        topic = _topic(daemon, "private", "--fixed", "1s", "--max-attempts", "1")
        message_id = _dmq(daemon, "msg", "send", topic, "body")
        client = WireClient(daemon.address, client_id="somebody")
        with client.channel:
            message = _received(client, topic)
            assert _report(client, topic, message.system_properties.receipt_handle, "secret") == wire.NOT_IMPLEMENTED
            _nack(client, topic, message)
        assert _letter(daemon, topic, message_id)["failure"] is None


def test_the_log_shows_retries_and_dead_letters(tmp_path: Path) -> None:
    """One line of a kind in some seconds, with the error; the number of those left out is in the next one."""
    with Daemon(tmp_path / "data", processes=1) as daemon:
        topic = _topic(daemon, "logged", "--fixed", "1s", "--max-attempts", "2")
        ids = [_dmq(daemon, "msg", "send", topic, f"fail 9 {number}") for number in range(3)]
        with _consuming(daemon, topic, tmp_path):
            for each in ids:
                _letter(daemon, topic, each)
        lines = [json.loads(line) for line in daemon.log().splitlines() if line.startswith("{")]
    for event in ("message_retried", "message_dead_lettered"):
        (line,) = [each for each in lines if each["event"] == event]
        assert (line["group"], line["topic"], line["error"]) == (topic, topic, "RuntimeError: it says so")
        assert line["message_id"] in ids


def test_the_trail_shows_the_reason(tmp_path: Path) -> None:
    """``audit explain`` has the error and the client of each failure, the report counts failures by error, escaped."""
    data, out = tmp_path / "data", tmp_path / "out"
    with Daemon(data, processes=1) as daemon:
        topic = _topic(daemon, "explained", "--fixed", "1s", "--max-attempts", "2")
        message_id = _dmq(daemon, "msg", "send", topic, "body")
        client = WireClient(daemon.address, client_id="explainer")
        with client.channel:
            for _ in range(2):
                message = _received(client, topic)
                _report(client, topic, message.system_properties.receipt_handle, "<b>no courier</b>", "RuntimeError")
                _nack(client, topic, message)
        _letter(daemon, topic, message_id)
    trail = str(data / "trail")
    assert run_command("audit", "snapshot", "--data", str(data), "--trail", trail).returncode == 0
    explained = run_command("audit", "explain", message_id, "--trail", trail)
    assert explained.stdout.count("error: RuntimeError: <b>no courier</b> (explainer, address loopback)") == 2
    audited = run_command("audit", "run", "--trail", trail, "--out", str(out), "--no-snapshot")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    (error,) = json.loads((out / "report.json").read_text())["errors"]
    assert error.pop("last_ms") > 0
    assert error == {"group": topic, "error": "RuntimeError: <b>no courier</b>", "failures": 2, "dead": 1}
    page = (out / "report.html").read_text()
    assert "RuntimeError: &lt;b&gt;no courier&lt;/b&gt;" in page
    assert "<b>no courier" not in page
