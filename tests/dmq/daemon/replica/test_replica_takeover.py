"""Takeover by a standby: the primary is killed with its directory, and its successor keeps every promise."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from support.clients.load.crash import Load
from support.clients.wire.client import WireClient, a_message
from support.effort import EFFORT, SEED, at_length
from support.models.trail.read import read_trail
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.replica.pair import Pair, assert_kept
from support.rigs.services.object_server import S3Server

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.replication.objects import open_objects
from dmq.store.schema.keys import FORMAT_VERSION

pytestmark = pytest.mark.fault
ROUNDS = EFFORT
_DRAIN_S_MAX = 90.0


def health(daemon: Daemon) -> int:
    """Return the answer of the health service."""
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = HealthStub(channel)
        return int(stub.Check(HealthCheckRequest(), timeout=30).status)


def send(daemon: Daemon, message_id: str, *, deliver_at_ms: int) -> None:
    """Send a message with this id, and assert that the answer is OK."""
    with WireClient(daemon.address) as client:
        answer = client.send(a_message("orders", message_id, deliver_at_ms=deliver_at_ms))
        assert answer.status.code == wire.OK


@pytest.mark.timeout(180 + 90 * ROUNDS)
def test_a_takeover_keeps_every_promise(tmp_path: Path) -> None:
    """The primary is killed and its directory deleted, under load: the standby has everything that was answered OK."""
    print(f"DMQ_TEST_SEED={SEED} rounds={ROUNDS}")
    rng = random.Random(SEED)
    with ExitStack() as stack:
        server = S3Server(tmp_path / "server")
        stack.callback(server.kill)
        pair = stack.enter_context(closing(Pair(tmp_path, "s3://orders/store", server.environment())))
        load = stack.enter_context(closing(Load(pair.front.address, SEED)))
        with pair.managed():
            for _ in range(ROUNDS):
                load.ledger.wait_for_sends(rng.randint(50, 300))
                pair.lose()
            load.end_sending()
            pair.end_with_successor()  # leases end here: a renewed one lasts as long as its receiver
            load.drain(_DRAIN_S_MAX)
        pair.primary.stop()
        assert_kept(load, pair.primary.data)
        done = run_command("replica", "check", "--replica-url", pair.url, env=server.environment())
        assert done.returncode == 0, done.stderr


def test_a_stopped_primary_is_replaced_and_answers_nothing(tmp_path: Path) -> None:
    """A primary that was stopped past its lease finds its successor: it answers no write, and ends with exit code 8."""
    pair = Pair(tmp_path)
    with closing(pair):
        first = pair.primary
        assert run_command("topic", "create", "orders", "--address", first.address).returncode == 0
        first.signal(signal.SIGSTOP)
        pair.take_over()
        first.signal(signal.SIGCONT)
        assert run_command("topic", "create", "late", "--address", first.address).returncode != 0
        assert first.wait(60) == 8
        assert first.events("fenced")
        found = run_command("topic", "ls", "--json", "--address", pair.primary.address).stdout
        assert ("orders" in found, "late" in found) == (True, False)


@at_length
@pytest.mark.timeout(180 + 90 * ROUNDS)
def test_a_stopped_primary_under_load_loses_nothing(tmp_path: Path) -> None:
    """SIGSTOP, takeover, SIGCONT under load: the old primary always ends as fenced, and no OK of it was lost."""
    pair = Pair(tmp_path)
    with closing(pair), closing(Load(pair.front.address, SEED)) as load:
        with pair.managed():
            for _ in range(ROUNDS):
                load.ledger.wait_for_sends(100)
                pair.suspend()
            load.end_sending()
            load.drain(_DRAIN_S_MAX)
        pair.standby.kill()
        pair.primary.stop()
        assert_kept(load, pair.primary.data)


def test_a_clean_stop_hands_over_at_once(tmp_path: Path) -> None:
    """After a clean stop the standby has the same store, and the old directory joins again as standby."""
    pair = Pair(tmp_path)
    with closing(pair):
        assert run_command("topic", "create", "orders", "--address", pair.primary.address).returncode == 0
        pair.primary.stop()
        pair.take_over()
        found = run_command("topic", "ls", "--json", "--address", pair.primary.address)
        assert "orders" in found.stdout
        pair.wait_for_standby(pair.standby)
        pair.primary.stop()
        pair.take_over()


def test_a_fenced_primary_answers_unavailable(tmp_path: Path) -> None:
    """A send that waits for the copy when the primary is replaced ends with UNAVAILABLE, so clients repeat it."""
    with ExitStack() as stack:
        server = S3Server(tmp_path / "server")
        stack.callback(server.kill)
        env = server.environment() | {"DMQ_REPLICA_LEASE": "10s"}
        pair = stack.enter_context(closing(Pair(tmp_path, "s3://orders/store", env)))
        pool, first = stack.enter_context(ThreadPoolExecutor()), pair.primary
        client = stack.enter_context(WireClient(first.address))
        assert client.send(a_message("orders", "0A")).status.code == wire.OK
        server.kill()
        held = pool.submit(client.send, a_message("orders", "0B"), deadline_s=180)
        first.wait_for("replica_unreachable", timeout_s=60)  # the batch of that send is on its way
        first.signal(signal.SIGSTOP)
        server.start()
        pair.take_over()
        first.signal(signal.SIGCONT)
        end: Any = held.exception(180)
        assert first.wait(60) == 8
        assert isinstance(end, grpc.RpcError), held.result()
        assert end.code() is grpc.StatusCode.UNAVAILABLE


def test_indexed_properties_are_found_after_a_takeover_and_a_restore(tmp_path: Path) -> None:
    """The successor, and a store restored from the copy, find the same messages by the value of a user property."""

    def found(daemon: Daemon) -> Any:  # noqa: ANN401 - JSON
        listed = run_command("find", "customer=7", "--json", "--address", daemon.address)
        assert listed.returncode == 0, listed.stderr
        return json.loads(listed.stdout)["matches"]

    pair = Pair(tmp_path)
    with closing(pair), WireClient(pair.primary.address) as client:
        topic = ("topic", "set", "orders", "--address", pair.primary.address)
        assert run_command("topic", "create", *topic[2:]).returncode == 0
        assert run_command(*topic, "--index-property", "customer").returncode == 0
        for message_id, customer, deliver_at_ms in (("0A", "7", 0), ("0B", "7", 2**41), ("0C", "8", 0)):
            message = a_message("orders", message_id, deliver_at_ms=deliver_at_ms, properties={"customer": customer})
            assert client.send(message).status.code == wire.OK
        before = found(pair.primary)
        assert sorted((each["message_id"], each["state"]) for each in before) == [("0A", "queued"), ("0B", "waiting")]
        pair.primary.stop()
        pair.take_over()
        assert found(pair.primary) == before
        restored = tmp_path / "restored"
        done = run_command("replica", "restore", "--replica-url", pair.url, "--data", str(restored))
        assert done.returncode == 0, done.stderr
        with Daemon(restored) as daemon:
            assert found(daemon) == before


def test_an_upgrade_of_a_pair_to_a_new_format_loses_nothing(tmp_path: Path) -> None:
    """The standby is upgraded first; while it is stopped it is not registered. The older version does not follow the
    newer format, and joins once upgraded.
    """
    pair = Pair(tmp_path)

    def create(topic: str) -> None:
        done = run_command("topic", "create", topic, "--address", pair.primary.address)
        assert done.returncode == 0, done.stderr

    with closing(pair):
        create("before")
        pair.standby.stop()
        assert open_objects(pair.url).list("standbys/") == []
        pair.wait_for_standby(pair.upgraded(pair.standby))
        create("mixed")
        pair.primary.stop()
        pair.take_over()
        create("after")
        assert pair.standby.spawn().wait(60) != 0
        assert f"format version {FORMAT_VERSION + 1}, this Rock-DMQ knows {FORMAT_VERSION}" in pair.standby.log()
        pair.wait_for_standby(pair.upgraded(pair.standby))
        pair.primary.stop()
        shutil.rmtree(pair.primary.data)
        pair.take_over()
        found = run_command("topic", "ls", "--json", "--address", pair.primary.address).stdout
        assert all(topic in found for topic in ("before", "mixed", "after"))


def test_an_operator_promotes_a_standby_of_a_stopped_host(tmp_path: Path) -> None:
    """``dmq replica promote`` lets the standby take over although the primary renews its lease."""
    pair = Pair(tmp_path)
    with closing(pair):
        first = pair.primary
        assert run_command("replica", "promote", "--replica-url", pair.url).returncode == 0
        pair.take_over()
        assert first.wait(60) == 8


def test_an_object_server_that_is_down_holds_writes(tmp_path: Path) -> None:
    """While the object server is down no write is answered and the daemon is not ready; afterwards the write is OK."""
    with ExitStack() as stack:
        server = S3Server(tmp_path)
        stack.callback(server.kill)
        env = {**os.environ, **server.environment(), "DMQ_TRAIL": "off", "DMQ_REPLICA": "sync"}
        daemon = stack.enter_context(Daemon(tmp_path / "data", env=env | {"DMQ_REPLICA_URL": "s3://orders/store"}))
        create = ("topic", "create", "orders", "--timeout", "60s", "--address", daemon.address)
        server.kill()
        held = stack.enter_context(ThreadPoolExecutor()).submit(run_command, *create)
        daemon.wait_for("replica_unreachable", timeout_s=30)
        state = "SERVING"
        while state == "SERVING":
            state = json.loads(run_command("status", "--json", "--address", daemon.address).stdout)["state"]
        assert not held.done()
        while health(daemon) == HealthCheckResponse.SERVING:
            threading.Event().wait(0.1)
        server.start()
        assert held.result(90).returncode == 0
        daemon.wait_for("replica_reachable", timeout_s=30)
        while health(daemon) != HealthCheckResponse.SERVING:
            threading.Event().wait(0.1)


def test_the_trail_of_a_lost_primary_is_continued(tmp_path: Path) -> None:
    """On a real S3 server: the successor has every exported event of the lost host, continues the sequences and records
    the takeover; an audit of the trail is clean.
    """
    with ExitStack() as stack:
        server = S3Server(tmp_path)
        stack.callback(server.kill)
        env = server.environment() | {"DMQ_TRAIL": "auto", "DMQ_TRAIL_EVERY": "1s", "DMQ_REPLICA_LEASE": "5s"}
        pair = stack.enter_context(closing(Pair(tmp_path, "s3://orders/store", env)))
        with closing(Load(pair.front.address, SEED)) as load:
            pair.standby.wait_for("trail_fetched", timeout_s=60)
            load.ledger.wait_for_sends(50)
            pair.primary.kill()
            shutil.rmtree(pair.primary.data)
            pair.take_over()
            load.ledger.wait_for_sends(50)
            load.end_sending()
            load.drain(_DRAIN_S_MAX)
        pair.primary.stop()
        events = read_trail(pair.primary.data / "trail", pair.primary.event("serving")["cell"])
        assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
        assert {"TAIL_LOST", "GAP"}.isdisjoint(event["kind"] for event in events)
        assert [(event["kind"], event["boot"]) for event in events if event["kind"] in {"OPENED", "PROMOTED"}] == [
            ("OPENED", 1), ("OPENED", 2), ("PROMOTED", 2),
        ]  # fmt: skip
        trail, out = str(pair.primary.data / "trail"), str(tmp_path / "out")
        audited = run_command("audit", "run", "--trail", trail, "--out", out, "--no-snapshot")
        assert audited.returncode == 0, audited.stdout + audited.stderr


def test_a_check_lists_the_messages_of_a_diverged_tail(tmp_path: Path) -> None:
    """Messages that a lost asynchronous primary answered and did not send are listed by id; others are not. Their
    batches are those that its status reported as missing.
    """
    with closing(Pair(tmp_path, env={"DMQ_REPLICA": "async", "DMQ_REPLICA_EVERY": "1h"})) as pair:
        send(pair.primary, "0A", deliver_at_ms=0)
        pair.primary.stop()  # sends everything
        pair.take_over()
        pair.wait_for_standby(pair.standby)
        lost = pair.primary
        send(lost, "0B", deliver_at_ms=0)
        send(lost, "0C", deliver_at_ms=2**41)
        status = run_command("replica", "status", "--json", "--address", lost.address)
        lost.kill()
        pair.take_over()
        send(pair.primary, "0D", deliver_at_ms=0)
        pair.wait_for_standby(lost)
        kept = lost.wait_for("replica_diverged", timeout_s=60)["kept"]
        check = ("replica", "check", "--replica-url", pair.url, "--data", str(lost.data))
        (tail,) = json.loads(run_command(*check, "--json").stdout)["diverged"]
        assert tail["path"] == kept
        assert tail["batch"] - tail["common_batch"] == int(json.loads(status.stdout)["lag_batches"])
        assert tail["messages"] == [
            {"topic": "orders", "message_id": "0B", "state": "queued"},
            {"topic": "orders", "message_id": "0C", "state": "waiting"},
        ]
        shown = run_command(*check)
        assert shown.returncode == 0, shown.stderr
        assert "0B of orders, queued" in shown.stdout
        assert "2 messages are not in the log" in shown.stdout
