"""What an operator removes and resets is an exit of its own: the audit of a real daemon's trail stays clean.

One daemon plays all scenarios, each in a topic of its own, and one audit looks at what they left.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused
from spark_audit.engines.table import TableEngine
from spark_audit.explain import explained
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome

GROUP, OTHER = "workers", "readers"
RESET, KEPT, LETTERS, TICKS, MOVED = "reset", "kept", "letters", "ticks", "moved"  # the scenarios' topics
_LATER_MS = 3_600_000
pytestmark = pytest.mark.spark


class Played(NamedTuple):
    """What the scenarios left, and what they saw."""

    trail: Path
    outcome: AuditOutcome
    read: int  # of the topic with a retention, by the slower group
    letter: dict[str, Any]  # what was redriven to its group alone

    def ledger(self, topic: str) -> dict[str, Any]:
        """Return the rows of a topic by their groups."""
        return {row["group"]: row for row in self.outcome.report["fired"] if row["topic"] == topic}


@pytest.fixture(scope="module")
def played(engine: TableEngine, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All scenarios one after another, with kills in between, and their audit."""
    data = tmp_path_factory.mktemp("operators") / "data"
    with (
        Daemon(data, env=os.environ | {"DMQ_TRAIL_EVERY": "1s"}) as daemon,
        WireClient(daemon.address) as client,
        AdminClient(daemon.address) as admin,
    ):
        remove_and_reset(daemon, client, admin)
        read = retain(daemon, client, admin)
        letter = redrive(daemon, client)
        recur(daemon, admin)
        reschedule(daemon, client, admin)
        admin.take_snapshot()
        daemon.stop()
    return Played(data / "trail", run_audit(engine, str(data / "trail"), Options()), read, letter)


def test_changes_by_operators_leave_a_clean_trail(played: Played) -> None:
    """A group set to the end and back to the beginning, removed and made anew; its topic the same, with a kill."""
    assert (played.outcome.findings, played.outcome.exit_code) == ([], 0)
    ledger = played.ledger(RESET)
    assert (ledger[GROUP]["expired"], ledger[OTHER]["expired"], ledger[GROUP]["unread"]) == (20, 20, 5)
    assert sum(row["cancelled"] for row in played.outcome.report["scheduled"] if row["topic"] == RESET) == 5


def test_retention_leaves_a_clean_trail(played: Played) -> None:
    """Read by all, unread by one, unread by everybody, with a kill in between and a group that comes later."""
    assert (played.outcome.findings, played.outcome.exit_code) == ([], 0)
    ledger, read = played.ledger(KEPT), played.read
    assert (ledger[GROUP]["acked"], ledger[GROUP]["expired"], ledger[GROUP]["unread"]) == (40, 0, 5)
    assert (ledger[OTHER]["acked"], ledger[OTHER]["expired"], ledger[OTHER]["unread"]) == (read, 20 - read, 5)


def test_dead_letters_of_a_removed_group_are_listed_by_name(played: Played) -> None:
    """Redriven to the group alone, to everybody once it is gone, purged: each is attributed, and the audit is clean."""
    assert (played.outcome.findings, played.outcome.exit_code) == ([], 0)
    (dead,) = played.outcome.report["dead"]
    assert (dead["group"], dead["count"], dead["redriven"], dead["purged"]) == ("givers-up", 16, 8, 6)
    ledger = played.ledger(LETTERS)
    assert ledger[OTHER]["fired"] == 21
    assert ledger["givers-up"]["fired"] == 20
    child = played.letter["outcome_note"].split()[1]
    told = explained(child, played.trail, io.StringIO())
    assert [each["group"] for each in told["outcomes"]] == ["givers-up"]
    words = f"%DLQ%givers-up at offset {played.letter['offset']}, for group givers-up alone"
    assert words in told["events"][0]["words"]
    outcomes = explained(id_of(LETTERS, 8), played.trail, io.StringIO())["outcomes"]
    (letter, *_) = [each for each in outcomes if each["group"] == "givers-up"]
    assert letter["words"] == "had its dead letter thrown away"


def test_schedules_leave_a_clean_trail(played: Played) -> None:
    """Made, paused, resumed, replaced and removed, with a kill; what they sent is accepted and delivered, once each."""
    assert (played.outcome.findings, played.outcome.exit_code) == ([], 0)
    rows = [row for row in played.outcome.report["scheduled"] if row["topic"] == TICKS]
    assert sum(row["fired"] for row in rows) >= 7
    assert sum(row["pending"] for row in rows) == 0


def test_rescheduled_messages_leave_a_clean_trail(played: Played) -> None:
    """Later, earlier, fired, cancelled after it was moved: each is judged by the time that was set last."""
    assert (played.outcome.findings, played.outcome.exit_code) == ([], 0)
    own = [row for row in played.outcome.report["scheduled"] if row["topic"] == MOVED]
    sums = {name: sum(row[name] for row in own) for name in ("scheduled", "fired", "cancelled", "pending", "late")}
    assert sums == {"scheduled": 20, "fired": 12, "cancelled": 5, "pending": 3, "late": 0}
    told = explained(id_of(MOVED, 0), played.trail, io.StringIO())
    assert [each["kind"] for each in told["events"]][:4] == ["SCHEDULED", "RESCHEDULED", "RESCHEDULED", "DELIVERED"]
    assert "instead" in told["events"][1]["words"]


# -- the scenarios -----------------------------------------------------------------------------------------------------


def remove_and_reset(daemon: Daemon, client: WireClient, admin: AdminClient) -> None:
    """Set groups, and remove a group and its topic."""

    def reset(**to: bool) -> None:
        admin.reset_group(wire.ResetGroupRequest(group=GROUP, topic=RESET, **to))

    send(client, RESET, 0, 30)
    assert len(client.drain(RESET, GROUP, 10)) >= 10
    assert len(client.drain(RESET, OTHER, 30)) == 30
    reset(end=True)
    send(client, RESET, 100, 20)
    assert len(client.drain(RESET, GROUP, 20)) == 20
    reset(begin=True)
    assert len(client.drain(RESET, GROUP, 50)) == 50
    admin.remove_group(OTHER, force=True)
    assert len(client.drain(RESET, OTHER, 50)) == 50
    send(client, RESET, 200, 20)
    send(client, RESET, 300, 5, delay_ms=_LATER_MS)
    with pytest.raises(CallRefused, match="5 wait for their time"):
        admin.remove_topic(RESET)
    admin.remove_topic(RESET, force=True)
    send(client, RESET, 400, 20)
    assert len(client.drain(RESET, GROUP, 20)) == 20
    daemon.kill()
    daemon.restart()
    send(client, RESET, 500, 5)


def retain(daemon: Daemon, client: WireClient, admin: AdminClient) -> int:
    """Let a retention remove messages; return how many the slower group had read."""

    def gone() -> None:
        until_s = time.monotonic() + 20
        while admin.topic(KEPT).stored:
            assert time.monotonic() < until_s
            time.sleep(0.1)

    send(client, KEPT, 0, 20)
    admin.set_topic(KEPT, keep=wire.KeepChange(time_ms=1_000))
    gone()  # nobody was there
    send(client, KEPT, 100, 20)
    assert len(client.drain(KEPT, GROUP, 20)) == 20
    gone()
    daemon.kill()
    daemon.restart()
    assert client.receive(KEPT, OTHER) == []
    send(client, KEPT, 200, 20)
    assert len(client.drain(KEPT, GROUP, 20)) == 20
    assert len(client.drain(KEPT, OTHER, 5)) >= 5
    read: int = 20 - next(each.unread for each in admin.topic(KEPT).readers if each.group == OTHER)
    admin.set_topic(KEPT, keep=wire.KeepChange(unread="no"))
    gone()
    admin.set_topic(KEPT, keep=wire.KeepChange(time_ms=0))  # what is sent now stays, however slow the rest is
    send(client, KEPT, 300, 5)
    return read


def redrive(daemon: Daemon, client: WireClient) -> dict[str, Any]:
    """Let a group die with its dead letters; return what is shown of the first one."""
    group = "givers-up"
    send(client, LETTERS, 0, 16)
    assert len(client.drain(LETTERS, OTHER, 16)) == 16
    forward(client, group, 16)
    assert "redriven 4, skipped 12" in dmq(daemon, "dead", "redrive", group, *ids_of(0, 4))
    assert client.receive(LETTERS, OTHER) == []
    assert len(client.drain(LETTERS, group, 3)) >= 3
    daemon.kill()
    daemon.restart()
    dmq(daemon, "group", "rm", group, "--force", "--yes")
    assert json.loads(dmq(daemon, "dead", "groups", "-o", "json")) == [{"group": group, "dead": 12, "removed": True}]
    assert "redriven 4" in dmq(daemon, "dead", "redrive", group, "--all-groups", *ids_of(4, 4))
    dmq(daemon, "dead", "purge", group, "--why", "old", *ids_of(8, 6))
    shown: dict[str, Any] = json.loads(dmq(daemon, "dead", "show", group, id_of(LETTERS, 0), "-o", "json"))[0]
    child = shown["outcome_note"].split()[1]
    assert shown["outcome_note"] == f"{LETTERS} {child} for group {group}"
    assert len(client.drain(LETTERS, OTHER, 4)) == 4
    send(client, LETTERS, 100, 1)
    return shown


def recur(daemon: Daemon, admin: AdminClient) -> None:
    """Let messages recur, through a kill; one schedule waits when the snapshot is taken."""

    def schedule(name: str, **rule: Any) -> wire.Schedule:  # noqa: ANN401
        return wire.Schedule(name=name, topic=TICKS, content=wire.Content(body=b"tick"), **rule)

    def wait(name: str, occurrences: int) -> None:
        until_s = time.monotonic() + 60
        while admin.schedule(name).occurrences < occurrences:
            assert time.monotonic() < until_s
            time.sleep(0.1)

    admin.add_schedule(schedule("tick", interval_ms=1_000, catch_up="all"))
    wait("tick", 2)
    daemon.kill()
    daemon.restart()
    wait("tick", 4)
    admin.pause_schedule("tick")
    admin.resume_schedule("tick")
    admin.add_schedule(schedule("tick", interval_ms=1_000, count=3), replace=True)
    wait("tick", 3)
    admin.remove_schedule("tick")
    admin.add_schedule(schedule("later", cron="@yearly"))


def reschedule(daemon: Daemon, client: WireClient, admin: AdminClient) -> None:
    """Move delayed messages forth and back, fire some, cancel some after they were moved, with a kill in between."""
    send(client, MOVED, 0, 20, delay_ms=_LATER_MS)
    names = [id_of(MOVED, number) for number in range(20)]
    now_ms = admin.status().now_ms
    admin.reschedule(MOVED, names, deliver_at_ms=now_ms + 24 * _LATER_MS)
    daemon.kill()
    daemon.restart()
    assert {each.outcome for each in admin.fire(MOVED, names[:8])} == {wire.ChangedMessage.DONE}
    admin.reschedule(MOVED, names[8:12], deliver_at_ms=now_ms + 1)
    assert len(admin.cancel(MOVED, names[12:17])) == 5
    assert len(client.drain(MOVED, GROUP, 12)) == 12
    (late,) = admin.cancel(MOVED, names[:1])
    assert late.outcome == wire.ChangedMessage.TOO_LATE


def send(client: WireClient, topic: str, first: int, count: int, *, delay_ms: int = 0) -> None:
    due_ms = int(time.time() * 1000) + delay_ms if delay_ms else 0
    numbers = range(first, first + count)
    messages = [a_message(topic, id_of(topic, number), deliver_at_ms=due_ms) for number in numbers]
    assert client.send(*messages).status.code == public.OK


def id_of(topic: str, number: int) -> str:
    """Return the id of a message of a topic."""
    return f"{(RESET, KEPT, LETTERS, MOVED).index(topic):02X}{number:032X}"


def ids_of(first: int, count: int) -> list[str]:
    """Name dead letters to a command."""
    return [word for number in range(first, first + count) for word in ("--id", id_of(LETTERS, number))]


def dmq(daemon: Daemon, *arguments: str) -> str:
    """Run the command against a daemon; it must succeed."""
    done = run_command(*arguments, "--address", daemon.address, timeout_s=60)
    done.check_returncode()
    return done.stdout


def forward(client: WireClient, group: str, count: int) -> None:
    """Let the group give up everything that is there for it."""
    given_up = 0
    while given_up < count:
        for found in client.receive(LETTERS, group):
            request = public.ForwardMessageToDeadLetterQueueRequest(
                group=public.Resource(name=group),
                topic=public.Resource(name=LETTERS),
                receipt_handle=found.receipt_handle,
                message_id=found.message_id,
                delivery_attempt=1,
                max_delivery_attempts=1,
            )
            assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == public.OK
            given_up += 1


def test_a_restored_backup_leaves_a_clean_trail(engine: TableEngine, tmp_path: Path) -> None:
    """What it delivers and acknowledges once more is no duplicate; what was sent since the backup is named."""
    data, older, backup = tmp_path / "data", tmp_path / "older", tmp_path / "backup"
    with Daemon(data, env=os.environ | {"DMQ_TRAIL_EVERY": "1s"}) as daemon, WireClient(daemon.address) as client:
        client.receive(RESET, GROUP)
        for number in range(20):
            due_ms = round(time.time() * 1000) + 500 if number % 2 else 0
            assert client.send(a_message(RESET, f"before-{number}", deliver_at_ms=due_ms)).status.code == public.OK
        assert run_command("store", "backup", str(backup), "--address", daemon.address).returncode == 0
        finish(client, 20)
        for number in range(5):
            assert client.send(a_message(RESET, f"after-{number}")).status.code == public.OK
        finish(client, 2)
        daemon.stop()
        data.rename(older)
        shutil.copytree(backup, data)
        (older / "trail").rename(data / "trail")
        daemon.restart()
        finish(client, 20)
        assert client.send(a_message(RESET, "after-4")).status.code == public.OK
        daemon.stop()
    outcome = run_audit(engine, str(data / "trail"), Options())
    gone = {each["message_id"] for each in outcome.findings if each["kind"] == "INCONCLUSIVE"}
    assert {each["kind"] for each in outcome.findings} == {"INCONCLUSIVE", "PUT_BACK"}
    assert gone < {f"after-{number}" for number in range(4)}
    assert len(gone) >= 2
    (row,) = (row for row in outcome.report["fired"] if row["topic"] == RESET)
    assert (row["fired"], row["acked"], row["unread"]) == (21, 20, 1)


def finish(client: WireClient, count: int) -> None:
    """Receive and acknowledge so many messages."""
    done = 0
    while done < count:
        found = client.receive(RESET, GROUP, batch=min(16, count - done), wait_s=2)
        assert found
        client.ack(RESET, GROUP, found)
        done += len(found)
