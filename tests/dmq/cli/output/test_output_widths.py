"""Tables of real commands against a real daemon, at terminals of the usual widths."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

import pytest
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.rigs.commands.terminal import at_terminal
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = pytest.mark.integration

# Lists, with the number of their lines below the headings; 0: text in them may fold.
LISTS = {
    "topic ls": 4,
    "group ls": 1,
    "msg ls orders": 5,
    "msg peek orders": 4,
    "msg fire orders --all --dry-run": 2,
    "msg jobs": 1,
    "retry ls billing": 1,
    "retry stats": 0,
    "dead ls billing": 1,
    "dead groups": 1,
    "dead jobs": 1,
    "cron ls": 0,
    "client ls": 1,
    "quota ls": 0,
    "activity ls": 0,
    "dead ls billing --by-error": 0,
    "dead ls billing --all-outcomes": 2,
    "audit ls": 1,
    "top --once --interval 100ms": 0,
}
SHOWS = ("ledger --groups", "topic show orders", "group show billing")
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A daemon that holds something of everything, as the environment in which commands find it."""
    home = tmp_path_factory.mktemp("widths")
    with Daemon(home / "data", processes=1) as daemon:
        env = {"DMQ_ADDRESS": daemon.address, "DMQ_CONFIG_DIR": str(home)}
        _fill(daemon.address, env)
        yield env


def _fill(address: str, env: Mapping[str, str]) -> None:
    now_ms = int(time.time() * 1000)
    ids = [new_message_id(now_ms, 4711, bytes([number] * 10)) for number in range(8)]
    policy = run_command(*["group", "set-policy", "billing", "--fixed", "1h", "--max-attempts", "5"], env=env)
    assert policy.returncode == 0, policy.stderr
    with WireClient(address, "courier-7f9c@4711@0@k3j2h1") as client:
        for each in ids[:4]:
            assert client.send(_message(each)).status.code == wire.OK
        pushed = a_receive("orders", "billing", wait_s=5)
        pushed.auto_renew = True
        (failed,) = received_of(client.frames("ReceiveMessage", pushed))
        client.change_invisible("orders", "billing", failed, 1000)
        held: list[Received] = []
        while len(held) < 3:
            held += client.receive("orders", "billing", wait_s=5)
        alive = wire.HeartbeatRequest(client_type=wire.PUSH_CONSUMER, group=wire.Resource(name="billing"))
        assert client.ask("Heartbeat", alive).status.code == wire.OK
        for received in held[:2]:
            request = wire.ForwardMessageToDeadLetterQueueRequest(
                topic=wire.Resource(name="orders"),
                group=wire.Resource(name="billing"),
                message_id=received.message_id,
                receipt_handle=received.receipt_handle,
                delivery_attempt=1,
                max_delivery_attempts=1,
            )
            assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == wire.OK
        assert client.send(_message(ids[4], deliver_at_ms=now_ms + 90 * 60_000)).status.code == wire.OK
    for command in (
        "topic create a-topic-of-the-north",
        "cron add nightly-settlement-of-accounts orders body --cron 0_3_*_*_1-5 --zone Europe/Berlin",
        "quota set key billing-service bytes 1073741824",
        "audit snapshot",
        "msg recall orders --tag nothing-of-the-kind --yes",
        f"dead redrive billing --id {held[0].message_id} --yes",
    ):
        done = run_command(*(word.replace("_", " ") for word in command.split()), env=env)
        assert done.returncode == 0, done.stderr


def _message(message_id: str, *, deliver_at_ms: int = 0) -> wire.Message:
    message = a_message("orders", message_id, tag="created", deliver_at_ms=deliver_at_ms)
    message.system_properties.keys.append("order-4711")
    return message


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_no_table_is_wider_than_the_terminal(env: Mapping[str, str], columns: int, terminal: str) -> None:
    """Ids and names of the usual length fit; no time, id or state of a list is folded, and no column is empty."""
    printed = at_terminal([each.split() for each in (*LISTS, *SHOWS)], columns, env={**env, "TERM": terminal})
    for command, text in zip((*LISTS, *SHOWS), map(plain, printed), strict=True):
        lines = text.splitlines()
        where = f"{command} at {columns}:\n{text}"
        assert len(lines) > 1, where
        assert max(map(len, lines)) <= columns, where
        if command in LISTS:
            assert not INSTANT.search(text), where
        if rows := LISTS.get(command):
            assert len(lines) == 1 + rows, where
    assert INSTANT.search(printed[-1])  # the full time is where one message, group or topic is shown


def plain(text: str) -> str:
    """Output without the bold type of its headings."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
