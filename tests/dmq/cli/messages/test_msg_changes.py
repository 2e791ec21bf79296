"""Recalling, rescheduling and firing messages by name and by filter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.forges.messages.letters import a_message
from support.rigs.commands.fake_admin_client import run_dmq
from support.rigs.commands.live_cell import NOW, LiveCell
from typer.testing import Result

from broker_adapter.contracts.message import pack_id
from dmq.admin.client import DaemonUnavailable
from dmq.broker.operations import message_jobs
from dmq.cli.bulk import changes, confirm, engine
from dmq.cli.bulk import jobs as watched
from dmq.store.schema.operators.message_jobs import MessageJob

HOUR_MS = 3_600_000
LATER = "2023-11-15T22:13:20.000Z"
LATER_MS = NOW + 24 * HOUR_MS


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon with four messages that wait, of which one cannot be read, and one that was delivered."""

    async def fill() -> None:
        await live.rig.broker.send([a_message("R")])
        await live.rig.broker.send([a_message("A", tag="t", keys=("k",), deliver_at_ms=NOW + HOUR_MS)])
        await live.rig.broker.send([a_message("B", tag="t", deliver_at_ms=NOW + 2 * HOUR_MS)])
        await live.rig.broker.send([a_message("C", deliver_at_ms=NOW + 3 * HOUR_MS)])
        await live.rig.broker.send([a_message("D", deliver_at_ms=NOW + 4 * HOUR_MS)._replace(payload=b"\xff\xff")])

    live.do(fill())
    return live


def waiting(daemon: LiveCell) -> dict[str, int]:
    """When each that waits is due, in ms from now."""
    found = json.loads(daemon.run("msg", "ls", "orders", "--state", "waiting", "-o", "json").stdout)
    return {each["message_id"]: each["deliver_at_ms"] - NOW for each in found["messages"]}


def answers(daemon: LiveCell, *arguments: str) -> tuple[dict[str, Any], int]:
    """What a command says to a program, and its exit code."""
    result = daemon.run("msg", *arguments, "-o", "json")
    return json.loads(result.stdout), result.exit_code


def test_messages_are_changed_by_their_ids(daemon: LiveCell) -> None:
    """One outcome for each, in order, and an exit code that says whether that is all that was asked for."""
    result = daemon.run("msg", "reschedule", "orders", "A", "B", "--at", LATER)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1].split(maxsplit=1) == ["A", f"will be delivered at {LATER}"]
    assert waiting(daemon) == {"A": 24 * HOUR_MS, "B": 24 * HOUR_MS, "C": 3 * HOUR_MS, "D": 4 * HOUR_MS}
    told, code = answers(daemon, "recall", "orders", "A", "R", "nobody")
    assert (code, told["done"], told["change"]) == (7, 1, "recall")
    assert [each["outcome"] for each in told["messages"]] == ["DONE", "TOO_LATE", "UNKNOWN"]
    assert [each["at_ms"] for each in told["messages"]] == [NOW, NOW, 0]
    again = daemon.run("msg", "recall", "orders", "A")
    assert (again.exit_code, again.stdout.splitlines()[1].split()[1:4]) == (0, ["was", "recalled", "at"])
    result = daemon.run("msg", "fire", "orders", "A", "B")
    assert (result.exit_code, result.stderr) == (7, "dmq: 1 of 2 delayed messages were not fired\n")
    assert "B" not in waiting(daemon) or waiting(daemon)["B"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["recall", "orders", "nobody"], 3, "not recalled: not known: never sent there"),
        (["recall", "orders", "R"], 3, "not recalled: was delivered at 2023-11-14T22:13:20.000Z"),
        (["reschedule", "orders", "R", "--in", "1h"], 3, "not rescheduled: was delivered at"),
        (["fire", "orders", "x", "y"], 3, "2 of 2 delayed messages were not fired"),
        (["fire", "nowhere", "x"], 3, "topic not found"),
        (["fire", "orders"], 2, "after a topic give message ids or a filter"),
        (
            ["recall", "01C0FFEE00C0FFEE000012340000000001"],
            2,
            "not a recall handle; give a message id after its topic",
        ),
        (["fire", "orders", "A", "--all"], 2, "give message ids or a filter, not both"),
        (["fire", "orders", "--all", "--key", "k"], 2, "--all selects all pending messages"),
        (["fire", "orders", "--due-after", "soon"], 2, "--due-after"),
        (["fire", "orders", "x", "R", "--dry-run"], 3, "not pending in topic orders: x, R"),
        (["fire", "orders", "A", "x", "--dry-run"], 7, "not pending in topic orders: x"),
        (["recall", "orders", "--own-key", "k", "--dry-run"], 3, "not pending in topic orders: own key k"),
        (["fire", "orders", "--all"], 2, "4 delayed messages of topic orders would be delivered now; there is no term"),
        (["reschedule", "orders", "A"], 2, "give one of them"),
        (["reschedule", "orders", "A", "--in", "1h", "--at", LATER], 2, "give one of them"),
        (["reschedule", "orders", "A", "--in", "soon"], 2, "'--in': 'soon' is refused"),
        (["reschedule", "orders", "A", "--by", "+1h"], 2, "it is for messages that are selected by a filter"),
        (["reschedule", "orders", "--all", "--by", "soon"], 2, "'--by': 'soon' is refused"),
        (["reschedule", "orders", "--all", "--by", "0s"], 2, "'--by'"),
        (["recall", "orders", "A", "--rate", "5"], 2, "'--rate'"),
        (["recall", "orders", "A", "--query", "tag:t"], 2, "give message ids or a filter, not both"),
        (["recall", "orders", "--query", "tagg:t", "--yes"], 1, "query, position 1: unknown word 'tagg'"),
        (["recall", "orders", "--query", "state:queued", "--yes"], 1, "only pending messages can be changed"),
        (["recall", "orders", "--query", "property:a=b", "--yes"], 1, "the property is not indexed in the topic"),
        (["recall", "nowhere", "--all"], 3, "topic not found"),
        (["outcomes", "9"], 3, "job 9 is not among the 100 newest jobs"),
        (["stop", "9"], 3, "no job has this number"),
        (["resume", "9"], 3, "no job has this number"),
    ],
)
def test_invalid_input_is_reported(daemon: LiveCell, arguments: list[str], code: int, text: str) -> None:
    """With an exit code for scripts, and nothing is changed."""
    before = waiting(daemon)
    result = daemon.run("msg", *arguments)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
    assert waiting(daemon) == before


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--all"], "ABCD"),
        (["--tag", "t"], "AB"),
        (["--key", "k"], "A"),
        (["--due-before", str(NOW + 3 * HOUR_MS)], "AB"),
        (["--query", f"tag:t due-before:{NOW + 2 * HOUR_MS}"], "A"),
        (["--tag", "t", "--query", "key:k"], "A"),
        (["--due-after", str(NOW + 2 * HOUR_MS), "--due-before", str(NOW + 4 * HOUR_MS)], "BC"),
    ],
)
def test_messages_are_changed_by_a_filter(daemon: LiveCell, options: list[str], names: str) -> None:
    """A dry run shows what a run then does; run again it finds nothing left."""
    before = waiting(daemon)
    told, code = answers(daemon, "recall", "orders", *options, "--dry-run")
    assert (code, told["matching"], [each["message_id"] for each in told["first"]]) == (0, len(names), list(names))
    assert waiting(daemon) == before
    result = daemon.run("msg", "recall", "orders", *options, "--yes")
    counted = "1 delayed message" if len(names) == 1 else f"{len(names)} delayed messages"
    assert (result.exit_code, result.stdout) == (0, f"{counted} recalled\n")
    assert waiting(daemon).keys() == before.keys() - set(names)
    assert answers(daemon, "recall", "orders", *options, "--yes")[0]["messages"] == []


def test_a_change_of_nothing_needs_no_confirmation(daemon: LiveCell) -> None:
    """It says so and ends."""
    result = daemon.run("msg", "recall", "orders", "--tag", "none")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "0 delayed messages recalled\n", "")


def test_a_dry_run_shows_the_named_items(daemon: LiveCell) -> None:
    """By an id or a recall handle; nothing is changed."""
    sent = json.loads(daemon.run("msg", "send", "orders", "x", "--delay", "5m", "--id", "H", "-o", "json").stdout)
    before = waiting(daemon)
    for named in (("orders", "H"), (sent["recall_handle"],)):
        told, code = answers(daemon, "fire", *named, "--dry-run")
        assert (code, told["matching"], told["first"][0]["message_id"]) == (0, 1, "H")
    assert waiting(daemon) == before


@pytest.mark.parametrize("selected", [["A"], ["--all"]])
def test_a_dry_run_names_the_pause_of_the_topic(daemon: LiveCell, selected: list[str]) -> None:
    """Messages of a paused topic are not delivered now: the dry run and the prompt state it."""
    assert daemon.run("topic", "pause", "orders").exit_code == 0
    result = daemon.run("msg", "fire", "orders", *selected, "--dry-run")
    assert result.stdout.rstrip().endswith("would be due now, held until its topic is resumed")
    asked = daemon.run("msg", "fire", "orders", "--all")
    assert "would be due now, held until its topic is resumed" in asked.stderr


def test_a_dry_run_shows_the_first_ones(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """And how many there are."""
    monkeypatch.setattr(changes, "_SHOWN", 2)
    result = daemon.run("msg", "fire", "orders", "--all", "--dry-run")
    assert [line.split()[2] for line in result.stdout.splitlines()[1:3]] == ["A", "B"]
    assert result.stdout.splitlines()[3] == "4 delayed messages would be delivered now; these are the first 2"


def test_named_messages_after_an_interruption_are_changed_by_the_same_command(
    daemon: LiveCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part is done and shown; the same command does the rest, and counts messages with their new time."""
    monkeypatch.setattr(engine, "BATCH", 1)
    calls = 0

    def fail(name: str) -> None:
        nonlocal calls
        calls += name == "ChangeMessages"
        if name == "ChangeMessages" and calls == 3:
            raise DaemonUnavailable("gone")

    daemon.before_call(fail)
    result = daemon.run("msg", "reschedule", "orders", "A", "B", "C", "D", "--at", LATER, "-o", "json")
    assert result.exit_code == 6
    assert "2 of 4 were processed; repeat the command for the others" in result.stderr
    assert [each["message_id"] for each in json.loads(result.stdout)["messages"]] == ["A", "B"]
    told, code = answers(daemon, "reschedule", "orders", "A", "B", "C", "D", "--at", LATER)
    assert (code, told["done"], told["deliver_at_ms"]) == (0, 4, LATER_MS)
    assert set(waiting(daemon).values()) == {24 * HOUR_MS}


def test_a_job_moves_each_message_by_an_offset(daemon: LiveCell) -> None:
    """Later or earlier; the jobs and their outcomes are listed, those that it did not change on their own."""
    sent = daemon.run(
        "msg", "send", "orders", "x", "--delay", "1h", "--not-after", str(NOW + 3 * HOUR_MS // 2), "--id", "E"
    )
    assert sent.exit_code == 0
    result = daemon.run("msg", "reschedule", "orders", "--all", "--by", "+1h", "--yes")
    assert (result.exit_code, result.stderr) == (7, "dmq: 1 of 5 delayed messages were not rescheduled\n")
    assert result.stdout.splitlines()[-1] == "4 delayed messages rescheduled, 1 not"
    assert waiting(daemon) == {name: hours * HOUR_MS for name, hours in zip("AEBCD", (2, 1, 3, 4, 5), strict=True)}
    told, code = answers(daemon, "reschedule", "orders", "--tag", "t", "--by", "-30m", "--yes")
    assert (code, told["done"], told["deliver_at_ms"]) == (0, 2, None)
    assert waiting(daemon)["A"] == 3 * HOUR_MS // 2
    listed = json.loads(daemon.run("msg", "jobs", "orders", "-o", "json").stdout)
    assert [(job["job_id"], job["query"], job["state"], job["done"], job["unchanged"]) for job in listed] == [
        (2, "tag:t", "DONE", 2, 0),
        (1, "", "DONE", 4, 1),
    ]
    shown = daemon.run("msg", "outcomes", "1", "--missed").stdout.splitlines()
    assert [line.split(maxsplit=2)[:2] for line in shown[1:]] == [["E", "expires"]]
    assert len(json.loads(daemon.run("msg", "outcomes", "1", "-o", "json").stdout)["messages"]) == 5


def test_a_job_is_stopped_and_resumed(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detached command returns at once; one that waits ends with its job, and names the command that continues it."""
    result = daemon.run("msg", "recall", "orders", "--all", "--rate", "0.001", "--detach", "--yes")
    assert result.stdout == "job 1 runs; 'dmq msg jobs orders' shows it, 'dmq msg stop 1' stops it\n"
    assert daemon.run("msg", "stop", "1").stdout.startswith("job 1 is stopped: ")
    left = len(waiting(daemon))
    assert left >= 3
    assert daemon.run("msg", "resume", "1").stdout.startswith("job 1 is running: ")
    refused = daemon.run("msg", "fire", "orders", "--all", "--yes")
    assert (refused.exit_code, "another job of this topic is running" in refused.stderr) == (1, True)
    assert daemon.run("msg", "stop", "1").exit_code == 0

    def stop(_: float) -> None:
        daemon.do(daemon.rig.broker.message_jobs.stop(2))

    monkeypatch.setattr(watched, "pause", stop)
    result = daemon.run("msg", "fire", "orders", "--all", "--rate", "0.001", "--yes")
    assert (result.exit_code, "'dmq msg resume 2' continues it" in result.stderr) == (1, True)


@pytest.mark.parametrize(("matching", "typed", "code"), [(2, "y\n", 0), (3, "y\n", 1), (3, "orders\n", 0)])
def test_a_large_change_needs_the_typed_name_of_the_topic(
    daemon: LiveCell, monkeypatch: pytest.MonkeyPatch, matching: int, typed: str, code: int
) -> None:
    """A yes is enough for a small one."""
    monkeypatch.setattr(changes, "UNCONFIRMED_MAX", 2)
    monkeypatch.setattr(confirm, "is_terminal", lambda: True)
    before = NOW + (matching + 1) * HOUR_MS
    result = run_dmq(
        *("--address", daemon.cell.listen, "msg", "recall", "orders"),
        *("--due-before", str(before)),
        stdin=typed.encode(),
    )
    assert (result.exit_code, len(waiting(daemon))) == (code, 4 if code else 4 - matching)


def test_a_message_delivered_meanwhile_is_reported(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the selection and the change: it was not recalled, and the exit code shows that some were not."""
    select = message_jobs.MessageJobs._select

    async def then_deliver(self: message_jobs.MessageJobs, job: MessageJob) -> None:
        await select(self, job)
        await daemon.rig.pass_ms(HOUR_MS)

    monkeypatch.setattr(message_jobs.MessageJobs, "_select", then_deliver)
    result = daemon.run("msg", "recall", "orders", "--tag", "t", "--yes")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (7, "1 delayed message recalled, 1 not")
    assert result.stdout.splitlines()[1].split()[:3] == ["A", "was", "delivered"]


def test_a_message_of_a_paused_topic_is_fired_and_held(daemon: LiveCell) -> None:
    """The answer names the pause, and the recall after it succeeds; a rate and a count of many are named, too."""
    assert daemon.run("topic", "pause", "orders").exit_code == 0
    result = daemon.run("msg", "fire", "orders", "A")
    assert (result.exit_code, result.stdout.splitlines()[1].split(maxsplit=1)) == (
        0,
        ["A", "is due; held until its topic is resumed, and can be recalled until then"],
    )
    told, code = answers(daemon, "recall", "orders", "A")
    assert (code, told["messages"][0]["outcome"]) == (0, "DONE")
    result = daemon.run("msg", "fire", "orders", "--tag", "t", "--yes")
    assert result.stdout == "1 delayed message fired, 1 of them held by a pause or a rate of the topic\n"
    assert daemon.run("topic", "resume", "orders").exit_code == 0
    assert daemon.run("topic", "set", "orders", "--deliver-rate", "1").exit_code == 0
    result = daemon.run("msg", "fire", "orders", "C")
    assert "is due; delivered in its turn at the rate of its topic" in result.stdout


def test_a_message_is_not_moved_beyond_its_expiry(daemon: LiveCell) -> None:
    """The refusal names the expiry, and the message keeps its time."""
    sent = daemon.run("msg", "send", "orders", "x", "--delay", "5m", "--not-after", LATER, "--id", "E")
    assert sent.exit_code == 0
    result = daemon.run("msg", "reschedule", "orders", "E", "--at", LATER)
    assert result.exit_code == 1
    assert f"not rescheduled: expires at {LATER}, not after the new delivery time: unchanged" in result.stderr
    assert waiting(daemon)["E"] == HOUR_MS // 12


def test_a_recall_handle_names_one_message(daemon: LiveCell) -> None:
    """And stays good when that is rescheduled."""
    sent = json.loads(daemon.run("msg", "send", "orders", "x", "--delay", "5m", "--id", "H", "-o", "json").stdout)
    handle = sent["recall_handle"]
    assert daemon.run("msg", "reschedule", handle, "--in", "1h").exit_code == 0
    assert waiting(daemon)["H"] == HOUR_MS
    assert daemon.run("msg", "fire", handle).exit_code == 0
    scope = daemon.rig.broker.names.topics["orders"].topic_id
    assert daemon.rig.store.find(scope, pack_id("H")) is not None
    assert daemon.run("msg", "recall", handle).stdout == "H\n"


def test_pending_messages_under_an_own_key(live: LiveCell) -> None:
    """Sent, shown, listed, moved and recalled by it; a later send replaces it, or is told which one is kept."""

    def send(name: str, *more: str) -> Result:
        return live.run("msg", "send", "orders", name, "--id", name, "--delay", "1h", "--own-key", "k", *more)

    assert send("A").stdout == "A\n"
    assert send("B").stdout == "B\n"
    kept = send("C", "--on-same-key", "keep")
    assert (kept.stdout, kept.stderr) == ("B\n", "dmq: not stored: pending message B has the own key k\n")
    assert waiting(live) == {"B": HOUR_MS}
    told, code = answers(live, "recall", "orders", "A")
    assert (code, told["messages"][0]["outcome"]) == (3, "REPLACED")
    assert json.loads(live.run("msg", "get", "orders", "--own-key", "k", "-o", "json").stdout)["message_id"] == "B"
    listed = json.loads(live.run("msg", "ls", "orders", "--own-key", "k", "-o", "json").stdout)["messages"]
    assert [each["message_id"] for each in listed] == ["B"]
    assert not json.loads(live.run("msg", "ls", "orders", "--own-key", "l", "-o", "json").stdout)["messages"]
    moved = live.run("msg", "reschedule", "orders", "--own-key", "k", "--at", LATER)
    assert moved.stdout.splitlines()[1].split(maxsplit=2) == ["B", "k", f"will be delivered at {LATER}"]
    told, code = answers(live, "recall", "orders", "--own-key", "k", "--own-key", "free")
    assert (code, [(each["own_key"], each["outcome"]) for each in told["messages"]]) == (
        7,
        [("k", "DONE"), ("free", "UNKNOWN")],
    )
    repeated = live.run("msg", "recall", "orders", "--own-key", "k")
    assert repeated.exit_code == 0
    assert repeated.stdout.splitlines()[1].startswith("B")
    assert " k " in repeated.stdout
    assert " was recalled at " in repeated.stdout
    assert "not fired: was recalled at" in live.run("msg", "fire", "orders", "--own-key", "k").stderr
    assert "no pending message has the own key free" in live.run("msg", "fire", "orders", "--own-key", "free").stderr
    gone = live.run("msg", "get", "orders", "--own-key", "k")
    assert (gone.exit_code, gone.stderr) == (3, "dmq: no pending message in topic orders has the own key k\n")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("get orders", "give one of them"),
        ("get orders A --own-key k", "give one of them"),
        ("send orders x --on-same-key keep", "it requires --own-key"),
        ("recall orders A --own-key k", "an own key selects one message"),
        ("recall orders --all --own-key k", "an own key selects one message"),
    ],
)
def test_own_keys_that_cannot_be(live: LiveCell, command: str, why: str) -> None:
    """A usage error that says what to give."""
    result = live.run("msg", *command.split())
    assert (result.exit_code, why in result.stderr) == (2, True), result.stderr
