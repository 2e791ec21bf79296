"""The process of the HTTP API: next to the daemon, and replaced when it dies."""

from __future__ import annotations

import signal
import ssl
import subprocess
import time
from http.client import HTTPSConnection
from pathlib import Path

import psutil
import pytest
from support.clients.wire.client import WireClient
from support.rigs.daemon.acl import OPERATOR, write_acl
from support.rigs.daemon.http_api import Api, api_of, serving
from support.rigs.daemon.process import START_S_MAX, run_command

from dmq.rocketmq_server.transport.tls import self_signed

pytestmark = pytest.mark.integration


def _process(api: Api) -> psutil.Process:
    (found,) = (
        each for each in psutil.Process(api.daemon.pid).children() if "dmq.http_api.process" in " ".join(each.cmdline())
    )
    return found


def test_a_delayed_message_sent_by_curl_arrives(api: Api) -> None:
    """The command of the docs sends it; a client of the public protocol receives it, not before its time."""
    due_ms = int(time.time() * 1000) + 1_000
    body = f'{{"body": "hello", "deliver_at_ms": {due_ms}, "tag": "greeting", "properties": {{"source": "curl"}}}}'
    subprocess.run(
        ["curl", "-sS", "--fail-with-body", "--json", body, f"http://{api.address}/v1/topics/orders/messages"],
        check=True,
    )
    with WireClient(api.daemon.address) as client:
        (received,) = client.drain("orders", "billing", 1)
    assert received.body == b"hello"
    assert time.time() * 1000 >= due_ms


def test_the_examples_of_the_docs_succeed(api: Api) -> None:
    """Each command of the page, in its order."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    commands = page.partition("```sh\n")[2].partition("```")[0].replace("127.0.0.1:8083", api.address)
    done = subprocess.run(
        ["bash", "-ec", commands.replace("curl ", "curl -sS --fail-with-body ")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    assert '"outcome":"DONE"' in done.stdout


def test_an_answer_follows_the_sync(tmp_path: Path) -> None:
    """A message that was answered with 201 is there after the daemon and the API are killed."""
    with api_of(tmp_path / "data") as api:
        sent = api.done("POST", "/v1/topics/orders/messages", [{"body": str(each)} for each in range(50)])
        api.daemon.kill()
        api.daemon.restart()
        with WireClient(api.daemon.address) as client:
            found = {each.message_id for each in client.drain("orders", "billing", 50)}
        assert found == {each["message_id"] for each in sent["messages"]}


def test_no_process_is_left_by_a_daemon_that_is_killed_at_once(tmp_path: Path) -> None:
    """It would keep the address, and the next start would be refused."""
    with api_of(tmp_path / "data") as api:
        process = _process(api)  # it still imports its modules
        api.daemon.kill()
        process.wait(START_S_MAX)


def test_a_dead_process_is_replaced_and_no_connection_is_refused(api: Api) -> None:
    """The daemon keeps the listening socket: requests wait in it while the process is started again."""
    before = _process(api)
    api.done("GET", "/v1/topics/orders/messages")
    before.kill()
    before.wait()
    assert api.done("POST", "/v1/topics/orders/messages", {"body": "after"})["messages"]
    assert _process(api).pid != before.pid
    assert api.daemon.events("http_api_ended")


def test_the_process_ends_with_a_killed_daemon(tmp_path: Path) -> None:
    """No process remains on the port of a daemon that is gone."""
    with api_of(tmp_path / "data") as api:
        api.done("POST", "/v1/topics/orders/messages", {"body": "hello"})
        process = _process(api)
        api.daemon.kill()
        process.wait(20)


def test_other_hosts_get_https_and_a_renewed_certificate(tmp_path: Path) -> None:
    """The certificate is that of the daemon. A new one is used without a restart."""
    data = tmp_path / "data"
    with api_of(data, "--http-api", "0.0.0.0:0", "--acl", str(write_acl(tmp_path))) as api:
        port = int(api.address.rpartition(":")[2])
        first = ssl.get_server_certificate(("127.0.0.1", port), timeout=60)
        assert first == (data / "tls" / "certificate.pem").read_text(encoding="utf-8")
        for name in ("certificate.pem", "key.pem"):
            (data / "tls" / name).unlink()
        self_signed(data / "tls", int(time.time() * 1000))
        until_s = time.monotonic() + 60
        while ssl.get_server_certificate(("127.0.0.1", port), timeout=60) == first:
            assert time.monotonic() < until_s
        trusted = ssl.create_default_context(cafile=str(data / "tls" / "certificate.pem"))
        trusted.check_hostname = False
        connection = HTTPSConnection("127.0.0.1", port, context=trusted, timeout=60)
        connection.request("GET", "/v1/status", headers={"authorization": f"Bearer {':'.join(OPERATOR)}"})
        assert connection.getresponse().status == 200
        connection.close()


def test_a_command_serves_another_daemon(api: Api) -> None:
    """``dmq http-api`` needs no store; beyond this host it needs a certificate and a daemon with access keys."""
    with serving(api.daemon.address) as other:
        assert other.done("POST", "/v1/topics/orders/messages", {"body": "hello"})["messages"]
    command = ("http-api", "--address", api.daemon.address, "--listen", "0.0.0.0:0")
    assert "--certificate" in run_command(*command).stderr
    certificate = str(api.daemon.data / "tls" / "certificate.pem")
    refused = run_command(*command, "--certificate", certificate)
    assert (refused.returncode, "has no access keys" in refused.stderr) == (2, True), refused


def test_a_stop_ends_the_process_first(tmp_path: Path) -> None:
    """SIGTERM ends both, with exit code 0."""
    with api_of(tmp_path / "data") as api:
        api.done("POST", "/v1/topics/orders/messages", {"body": "hello"})
        process = _process(api)
        api.daemon.stop(signal.SIGTERM)
        assert not process.is_running()
