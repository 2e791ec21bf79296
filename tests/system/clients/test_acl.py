"""Access keys on a real daemon: official clients with good and bad credentials, both transports, and the log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.official.client import LANGUAGES, ClientError, Language, OfficialClient, require
from support.clients.wire.client import WireClient, a_message, a_receive
from support.rigs.daemon.acl import ACL, HOOK, KEYS, OPERATOR, READER, SHOP, Key, write_acl
from support.rigs.daemon.process import Daemon, run_command, run_to_end

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient, NotAllowed
from dmq.client import SidecarClient
from retry.sink import Death, Entry, SinkError

pytestmark = pytest.mark.integration
CLOCK = SystemClock()
WRONG = Key(SHOP.access_key, "wrong-secret-0b0b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("acl")


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Daemon]:
    """A daemon with access keys. Whatever was done with it, its log holds no secret."""
    with Daemon(folder / "data", "--acl", str(write_acl(folder)), "--log-level", "debug") as daemon:
        yield daemon
        assert daemon.events("access_refused")
        assert daemon.event("starting")["acl"] == str(folder / "acl.toml")
        assert not any(key.secret_key in daemon.log() for key in (*KEYS, WRONG))


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.name)
def test_official_clients_with_good_and_bad_credentials(language: Language, guarded: Daemon, folder: Path) -> None:
    """Served with the right ones; else they hear what is missing, where the client passes it on, and send nothing."""
    require(language)
    home = folder / language.name
    home.mkdir()
    topic, billing, reading = (f"{name}-{language.name}" for name in ("orders", "billing", "reading"))
    with OfficialClient(language, home, guarded.address) as client:
        client.start("shop", "producer", topic, **SHOP.credentials)
        message_id = client.send("shop", topic)
        client.start("billing", "simple", topic, group=billing, wait_s=5, **SHOP.credentials)
        assert [each["message_id"] for each in client.receive_until("billing", 1)] == [message_id]
        client.start("push", language.listener, topic, group=reading, **READER.credentials)
        assert [each["message_id"] for each in client.wait_for_deliveries("push", 1)] == [message_id]

        def start_and_use(name: str, credentials: dict[str, str]) -> str:
            """Return why it failed: Node's clients do not even start, Python's do."""
            try:
                if name == "intruder":
                    client.start(name, "simple", topic, group=billing, **credentials)
                    return str(client.do("receive", name=name))
                client.start(name, "producer", topic, **credentials)
                return client.send(name, topic)
            except ClientError as error:
                return f"{error.type}: {error}"

        keys: dict[str, dict[str, str]] = {"stranger": {}, "wrong": WRONG.credentials}
        if "refused start" not in language.lacks:
            keys |= {"reader": READER.credentials, "intruder": READER.credentials}
        with ThreadPoolExecutor() as pool:  # at once: Node tries for 3 s
            said = dict(zip(keys, pool.map(start_and_use, keys, keys.values()), strict=True))
        for name in ("stranger", "wrong"):  # Python and Node say no more than that they got no route
            assert "route" in said[name].lower() or "unauthorized" in said[name]
        # Java may say no more than that its telemetry stream has ended
        vague = "but the service has FAILED" if "refusal" in language.lacks else "Stream is already completed"
        refusals = {"reader": f"PUB on topic '{topic}'", "intruder": f"SUB on group '{billing}'"}
        for name in said.keys() & refusals.keys():
            heard = said[name].replace("PUB on any topic", f"PUB on topic '{topic}'")  # a send, by its headers
            assert f"access key 'reader' lacks {refusals[name]}" in heard or vague in heard
    with AdminClient(guarded.address, signer=OPERATOR.signer()) as admin:
        assert [each.stored for each in admin.topics() if each.name == topic] == [1], "nothing else was sent"


def wire_client(daemon: Daemon, key: Key) -> WireClient:
    return WireClient(daemon.address, signer=key.signer())


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_both_transports_refuse_alike(transport: str, tmp_path: Path) -> None:
    """Calls with one answer, with a stream of them, the telemetry stream, and the admin service; health is open."""
    env = {**os.environ, "DMQ_TRANSPORT": transport}
    with (
        Daemon(tmp_path / "data", "--acl", str(write_acl(tmp_path)), env=env) as daemon,
        wire_client(daemon, SHOP) as shop,
        wire_client(daemon, WRONG) as wrong,
        WireClient(daemon.address) as stranger,
    ):
        assert shop.send(a_message("orders", "m-1")).status.code == wire.OK
        assert shop.send(a_message("prices", "m-2")).status.code == wire.FORBIDDEN
        assert shop.send(a_message("%DLQ%billing", "m-3")).status.code == wire.FORBIDDEN
        assert [each.message_id for each in shop.receive("orders", "billing", wait_s=5)] == ["m-1"]
        for client in (wrong, stranger):
            assert client.send(a_message("orders", "m-4")).status.code == wire.UNAUTHORIZED
            status, last = client.frames("ReceiveMessage", a_receive("orders", "billing"))
            assert (status.status.code, last.HasField("delivery_timestamp")) == (wire.UNAUTHORIZED, True)
            stream = client.open("Telemetry", iter([wire.TelemetryCommand()]))
            assert next(stream).status.code == wire.UNAUTHORIZED
            with pytest.raises(grpc.RpcError):
                next(stream)
            assert stream.code() is grpc.StatusCode.UNAUTHENTICATED
        with AdminClient(daemon.address, signer=OPERATOR.signer()) as admin:
            assert [(topic.name, topic.stored) for topic in admin.topics()] == [("orders", 1)]
        with AdminClient(daemon.address, signer=SHOP.signer()) as admin:
            assert [topic.name for topic in admin.topics()] == ["orders"], "its own"
        for signer in (None, WRONG.signer(), SHOP.signer()):
            with AdminClient(daemon.address, signer=signer) as admin, pytest.raises(NotAllowed):
                admin.status()
        check: Any = shop.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=5) == b"\x08\x01"


def test_keys_are_exchanged_while_the_daemon_runs(tmp_path: Path) -> None:
    """The new file counts within a second; a wrong one does not, and is told of."""
    path = write_acl(tmp_path)
    with Daemon(tmp_path / "data", "--acl", str(path)) as daemon, wire_client(daemon, SHOP) as shop:

        def until(code: int) -> None:
            until_ms = CLOCK.now_ms() + 10_000
            while shop.send(a_message("orders", "m-1")).status.code != code:
                assert CLOCK.now_ms() < until_ms

        until(wire.OK)
        write_acl(tmp_path, ACL.replace(SHOP.secret_key, "another"))
        until(wire.UNAUTHORIZED)
        path.write_text("[keys", encoding="utf-8")
        until_ms = CLOCK.now_ms() + 10_000
        while not daemon.events("access_keys_load_failed"):
            assert shop.send(a_message("orders", "m-1")).status.code == wire.UNAUTHORIZED
            assert CLOCK.now_ms() < until_ms


def test_the_sidecar_client_signs(guarded: Daemon) -> None:
    """With a key for its topics and groups and no more it can put, take, bury and requeue; without one it cannot."""
    now_ms = CLOCK.now_ms()
    entry = Entry(type_name="mail", uid=bytes(16), payload=b"payload", key="", created_at_ms=now_ms, due_at_ms=now_ms)
    with (
        SidecarClient(guarded.address) as stranger,
        pytest.raises(SinkError, match="is not signed"),
    ):
        stranger.put(entry).result(10)
    with SidecarClient(guarded.address, access_key=HOOK.access_key, secret_key=HOOK.secret_key) as client:
        client.put(entry).result(10)
        (held,) = client.take("mail", 1, 10)
        client.bury(held, Death.EXHAUSTED, "no").result(10)
        assert [dead.entry.uid for dead in client.dead("mail", limit=10)] == [entry.uid]
        assert client.requeue("mail", [entry.uid]) == 1
        (again,) = client.take("mail", 1, 10)
        client.finish(again).result(10)


def test_the_command_line_signs(guarded: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key and the secret of the environment; refused with 5 otherwise."""
    assert run_command("-a", guarded.address, "topic", "ls").returncode == 5
    monkeypatch.setenv("DMQ_ACCESS_KEY", OPERATOR.access_key)
    monkeypatch.setenv("DMQ_SECRET_KEY", OPERATOR.secret_key)
    for command in (("topic", "ls"), ("status",), ("msg", "send", "anything", "body")):
        ended = run_command("-a", guarded.address, *command)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_daemon_does_not_start_with_keys_that_are_open_to_others(tmp_path: Path) -> None:
    """One line that names the file, exit code 1, and no secret in what is said."""
    path = write_acl(tmp_path)
    path.chmod(0o644)
    ended = run_to_end(tmp_path / "data", "127.0.0.1:0", "--acl", str(path))
    assert ended.returncode == 1
    assert f"chmod 600 {path}" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not any(key.secret_key in ended.stderr for key in KEYS)


def test_a_stolen_signature_is_worth_nothing_for_ever(guarded: Daemon) -> None:
    """One from two days ago is refused, and says that it is the date."""

    class Yesterday(SystemClock):
        def now_ms(self) -> int:
            return super().now_ms() - 2 * 86_400_000

    with WireClient(guarded.address, signer=SHOP.signer(Yesterday())) as client:
        status = client.send(a_message("orders", "m-1")).status
    assert (status.code, "48.0 h away" in status.message) == (wire.UNAUTHORIZED, True)
