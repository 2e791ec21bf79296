"""Connected clients on the command line."""

from __future__ import annotations

import json

import pytest
from support.forges.wire.admin_clients import FixedClients
from support.rigs.commands.fake_admin_client import error_of
from support.rigs.commands.live_cell import LiveCell


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon with two clients and a message."""
    live.admin.clients.attach(FixedClients())
    live.run("msg", "send", "orders", "x", "--id", "m")
    return live


def test_clients(daemon: LiveCell) -> None:
    """A table, or a list with stable keys; of one group if asked for."""
    assert daemon.run("client", "ls").stdout.splitlines() == [
        "CLIENT  KIND           GROUP    LANGUAGE  VERSION  SEEN     STREAMS",
        "p@1     producer                PYTHON    5.1.2    12s ago        0",
        "c@1     push consumer  billing  JAVA      5.2.0    3s ago         1",
    ]
    found = json.loads(daemon.run("client", "ls", "--group", "billing", "-o", "json").stdout)
    assert [(client["client_id"], client["kind"], client["streams"]) for client in found] == [
        ("c@1", "PUSH_CONSUMER", 1)
    ]


def test_a_stack(daemon: LiveCell) -> None:
    """As the client wrote it, without what could move the cursor; the daemon answers a little after the client."""
    result = daemon.run("client", "stack", "c@1", "--timeout", "1500ms")
    assert (result.exit_code, result.stdout) == (0, "main:\n        at Main.run\\x1b[2J\n")
    assert daemon.deadlines[-1] == ("GetClientStack", 3.5)
    assert json.loads(daemon.run("client", "stack", "c@1", "-o", "json").stdout) == {
        "client_id": "c@1",
        "stack": "main:\n\tat Main.run\x1b[2J\n",
    }


def test_a_missing_or_silent_client(daemon: LiveCell) -> None:
    """3 for one that is not connected, 6 for one that does not answer, each with a sentence."""
    gone = daemon.run("client", "stack", "gone")
    assert (gone.exit_code, "no client with this id is connected" in gone.stderr) == (3, True)
    silent = daemon.run("client", "stack", "p@1", "-o", "json")
    assert (silent.exit_code, error_of(silent)["message"]) == (6, "the client p@1 did not answer within 5 s")


def test_a_message_is_verified(daemon: LiveCell) -> None:
    """0 if the client took it; 1 if not, with its code and its words, also for programs."""
    good = daemon.run("client", "verify", "takes", "orders", "m")
    assert (good.exit_code, good.stdout) == (0, "takes consumed m\n")
    bad = daemon.run("client", "verify", "c@1", "orders", "m")
    assert (bad.exit_code, bad.stdout) == (1, "")
    assert "c@1 did not consume m (60000 FAILED_TO_CONSUME_MESSAGE): no" in bad.stderr
    told = daemon.run("client", "verify", "c@1", "orders", "m", "-o", "json")
    assert (told.exit_code, json.loads(told.stdout)["code_name"]) == (1, "FAILED_TO_CONSUME_MESSAGE")
