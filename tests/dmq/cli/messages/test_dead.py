"""Dead letters on the command line: lists, single ones, files."""

from __future__ import annotations

import base64
import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.forges.messages.letters import PURGE, REDRIVE, a_message, die, fail, finish, only, set_policy
from support.rigs.commands.live_cell import NOW, LiveCell

from dmq.admin.client import DaemonUnavailable
from dmq.broker.operations import dead_letters
from dmq.cli.bulk import progress

GROUP = "billing"
MINUTE = 60_000
BODY = b"caf\xc3\xa9 \x1b[31mred"


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """Four dead letters, a minute apart from each other and from now: exhausted, forwarded, redriven, sent there."""
    rig = live.rig

    async def fill() -> None:
        await set_policy(rig, 1, 1_000, group=GROUP)
        await fail(rig, "D0", group=GROUP)
        rig.clock.advance(MINUTE)
        await die(rig, a_message("D1", topic="refunds", body=BODY, tag="new", keys=("k1", "k2")), group=GROUP)
        rig.clock.advance(MINUTE)
        await die(rig, a_message("D2"), group=GROUP)
        rig.clock.advance(MINUTE)
        await rig.broker.send([a_message("D3", topic=f"%DLQ%{GROUP}", keys=("k3",))])
        await finish(rig, replace(REDRIVE, group=GROUP, filter=only("D2")))
        rig.clock.advance(MINUTE)

    live.do(fill())
    return live


def listed(daemon: LiveCell, *arguments: str) -> list[int]:
    result = daemon.run("dead", "ls", GROUP, *arguments, "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    return [found["offset"] for found in json.loads(result.stdout)]


def cut_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the daemon look at one letter a call."""
    monkeypatch.setattr(dead_letters, "ROWS_PER_CALL_MAX", 1)


def test_groups_with_dead_letters(daemon: LiveCell) -> None:
    """Those without are left out; one that is removed or paused is there, with its state."""
    daemon.run("group", "create", "idle")
    daemon.run("group", "pause", GROUP)
    daemon.do(die(daemon.rig, *(a_message(each, topic="other") for each in ("G1", "G2")), group="gone"))
    assert daemon.run("group", "rm", "gone", "--force", "--yes").exit_code == 0
    lines = [line.split() for line in daemon.run("dead", "groups").stdout.splitlines()]
    assert lines == [["GROUP", "DEAD", "STATE"], [GROUP, "3", "paused"], ["gone", "2", "removed"]]
    assert json.loads(daemon.run("dead", "groups", "-o", "json").stdout) == [
        {"group": GROUP, "dead": 3, "removed": False},
        {"group": "gone", "dead": 2, "removed": True},
    ]


def test_dead_letters_are_listed_in_the_order_of_their_death(daemon: LiveCell) -> None:
    """When, of what, and why; those with an outcome only if asked for."""
    assert daemon.run("dead", "ls", GROUP).stdout.splitlines() == [
        "DEAD    LAST FAILED  TOPIC    MESSAGE ID  REASON     ATTEMPTS  TAG  KEYS",
        "4m ago  4m ago       orders   D0          exhausted         1",
        "3m ago  3m ago       refunds  D1          forwarded         1  new  k1 k2",
        "1m ago  1m ago                D3          sent_here         0       k3",
    ]
    lines = daemon.run("dead", "ls", GROUP, "--all-outcomes").stdout.splitlines()
    assert lines[0].endswith("KEYS   OUTCOME")
    assert lines[3].endswith(" redriven")
    found = json.loads(daemon.run("dead", "ls", GROUP, "-o", "json").stdout)
    assert (found[0]["reason"], found[2]["reason"]) == ("EXHAUSTED", "SENT_HERE")
    assert found[0]["content"]["body"] is None


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        (["--reason", "forwarded"], [1]),
        (["--reason", "FORWARDED", "--reason", "exhausted"], [0, 1]),
        (["--reason", "sent_here"], [3]),
        (["--reason", "SENT_HERE", "--reason", "exhausted"], [0, 3]),
        (["--topic", "orders", "--topic", "x"], [0]),
        (["--key", "k2", "--key", "k3"], [1, 3]),
        (["--since", "2023-11-14T22:14:20Z"], [1, 3]),
        (["--until", str(NOW + MINUTE)], [0]),
        (["--since", "2023-11-14T22:14:20Z", "--until", "2023-11-14T22:14:20.001Z"], [1]),
        (["--all-outcomes"], [0, 1, 2, 3]),
        (["--limit", "3", "--all-outcomes"], [0, 1, 2]),
        (["--since", "-3m"], [1, 3]),
        (["--until", "-3m"], [0]),
        (["--since=-100000d"], [0, 1, 3]),
    ],
)
def test_filters(daemon: LiveCell, options: list[str], offsets: list[int]) -> None:
    """Words of one option are alternatives, options together narrow; an age counts by the clock of the daemon."""
    assert listed(daemon, *options) == offsets


@pytest.mark.parametrize(
    "options",
    [
        ("--since", "+1h"),
        ("--since", "-"),
        ("--since", "1700000000"),
        ("--until", "2023-11-14"),
        ("--since", "2023-11-14T22:18:20Z", "--until", "2023-11-14T22:18:20Z"),
        ("--reason", "unknown"),
        ("--limit", "0"),
    ],
)
def test_wrong_usage_lists_nothing(daemon: LiveCell, options: tuple[str, ...]) -> None:
    """Exit code 2, one line that says where to look."""
    result = daemon.run("dead", "ls", GROUP, *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "see 'dmq dead ls --help'" in result.stderr
    assert "ListDeadLetters" not in daemon.calls


def test_a_list_continues_over_short_and_empty_pages(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call looks at a bounded number of letters; the end is where the daemon says so."""
    cut_to_one(monkeypatch)
    assert listed(daemon, "--key", "k3") == [3]
    assert daemon.calls.count("ListDeadLetters") == 4


def test_a_truncated_list_is_marked(daemon: LiveCell) -> None:
    """On stderr, and no more is read than is shown."""
    result = daemon.run("dead", "ls", GROUP, "--limit", "1")
    assert (len(result.stdout.splitlines()), result.stderr) == (2, "dmq: the first 1; --limit shows more\n")
    assert daemon.calls.count("ListDeadLetters") == 1
    assert daemon.run("dead", "ls", GROUP, "--limit", "9").stderr == ""


def test_everything_about_one(daemon: LiveCell) -> None:
    """Where it came from, why and when it died, what became of it, and what it is; the body only if asked for."""
    lines = daemon.run("dead", "show", GROUP, "D2").stdout.splitlines()
    told = lines.pop(8)
    assert lines == [
        "message id    D2",
        "origin topic  orders",
        "reason        forwarded",
        "attempts      1",
        "first failed  2023-11-14T22:15:20.000Z (2m ago)",
        "last failed   2023-11-14T22:15:20.000Z (2m ago)",
        "dead at       2023-11-14T22:15:20.000Z (2m ago)",
        "offset        2",
        "properties    color=red",
        "body size     4 B",
    ]
    assert told.startswith("outcome       redriven 2023-11-14T22:16:20.000Z (1m ago): orders 01")
    assert told.endswith(" for group billing")
    assert "outcome       none" in daemon.run("dead", "show", GROUP, "D1").stdout
    assert daemon.run("dead", "show", GROUP, "D1", "--body").stdout.endswith("body          café \\x1b[31mred\n")
    (found,) = json.loads(daemon.run("dead", "show", GROUP, "D1", "--body", "-o", "json").stdout)
    assert base64.b64decode(found["content"]["body"]) == BODY


def test_a_message_that_died_twice_is_shown_twice(daemon: LiveCell) -> None:
    """Once for each death: an id is unique in its topic only."""
    daemon.do(die(daemon.rig, a_message("D1", topic="other"), group=GROUP))
    blocks = daemon.run("dead", "show", GROUP, "D1").stdout.split("\n\n")
    assert [block.splitlines()[7].split() for block in blocks] == [["offset", "1"], ["offset", "4"]]
    assert len(json.loads(daemon.run("dead", "show", GROUP, "D1", "-o", "json").stdout)) == 2


def test_one_that_was_purged_is_shown_without_its_body(daemon: LiveCell) -> None:
    """What it said is gone on purpose; why, is not."""
    daemon.do(finish(daemon.rig, replace(PURGE, group=GROUP, filter=only("D1"))))
    lines = daemon.run("dead", "show", GROUP, "D1", "--body").stdout.splitlines()
    assert "outcome       purged 2023-11-14T22:17:20.000Z (in 0ms): too old to matter" in lines
    assert lines[-1] == "message       its body went with its purge"


def test_an_export_is_json_lines(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object a line, in ASCII, with bodies in base64; those with an outcome are left out."""
    cut_to_one(monkeypatch)
    result = daemon.run("dead", "export", GROUP)
    assert (result.exit_code, result.stderr, result.stdout.isascii()) == (0, "", True)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["message_id"] for each in found] == ["D0", "D1", "D3"]
    assert [base64.b64decode(each["content"]["body"]) for each in found] == [b"body", BODY, b"body"]
    result = daemon.run("dead", "export", GROUP, "--id", "D1", "--id", "D3", "--reason", "forwarded")
    assert [json.loads(line)["message_id"] for line in result.stdout.splitlines()] == ["D1"]


def test_long_work_reports_its_progress(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On stderr, for people only."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert daemon.run("dead", "ls", GROUP, "--key", "k3").stderr == "dmq: dead letters of billing: 1 found\n"
    assert daemon.run("dead", "export", GROUP, "--key", "k3").stderr == "dmq: export of billing: 1 letters\n"
    for command in (("ls", GROUP), ("show", GROUP, "D1"), ("export", GROUP)):
        assert daemon.run("dead", *command, "-o", "json").stderr == ""


def test_an_export_to_a_file(daemon: LiveCell, tmp_path: Path) -> None:
    """The file is replaced whole; bodies are for the owner's eyes only."""
    file = tmp_path / "dead.jsonl"
    file.write_text("old", encoding="utf-8")
    result = daemon.run("dead", "export", GROUP, "--out", str(file), "-o", "json")
    assert json.loads(result.stdout) == {"group": GROUP, "file": str(file), "letters": 3, "unreadable": 0}
    assert [json.loads(line)["offset"] for line in file.read_text(encoding="utf-8").splitlines()] == [0, 1, 3]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    result = daemon.run("dead", "export", GROUP, "--id", "D1", "--out", str(file))
    assert result.stdout == f"1 dead letter of billing in {file}\n"


def test_an_export_that_fails_leaves_the_old_file(
    daemon: LiveCell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half of one is worse than none; nothing else is left either."""
    file = tmp_path / "dead.jsonl"
    file.write_text("old", encoding="utf-8")
    cut_to_one(monkeypatch)

    def fail_at_the_second(name: str) -> None:
        if daemon.calls.count("ListDeadLetters") == 2:
            raise DaemonUnavailable("gone")

    daemon.before_call(fail_at_the_second)
    result = daemon.run("dead", "export", GROUP, "--out", str(file))
    assert (result.exit_code, result.stdout, result.stderr) == (6, "", "dmq: gone\n")
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_export_goes_where_a_link_points(daemon: LiveCell, tmp_path: Path) -> None:
    """The link stays a link."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    assert daemon.run("dead", "export", GROUP, "--out", str(link)).exit_code == 0
    assert (link.is_symlink(), len(file.read_text(encoding="utf-8").splitlines())) == (True, 3)


def test_an_export_replaces_files_only(daemon: LiveCell, tmp_path: Path) -> None:
    """A device or a directory would be gone; a missing directory is a mistake of the command line."""
    for target in ("/dev/null", str(tmp_path), str(tmp_path / "missing" / "x")):
        result = daemon.run("dead", "export", GROUP, "--out", target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--out" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/null").is_file()


def test_an_unreadable_row_is_exported_as_such_and_reported(daemon: LiveCell, tmp_path: Path) -> None:
    """The others are complete, and the exit code says that not all are; one is shown with what is known of it."""
    damaged = a_message("X", topic="refunds")._replace(payload=b"\xff\xff")
    daemon.do(die(daemon.rig, damaged, group=GROUP))
    file = tmp_path / "dead.jsonl"
    result = daemon.run("dead", "export", GROUP, "--out", str(file))
    assert (result.exit_code, result.stderr) == (4, "dmq: 1 of 4 cannot be read, their content is null\n")
    found = [json.loads(line)["content"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert [each is None for each in found] == [False, False, False, True]
    lines = daemon.run("dead", "show", GROUP, "X").stdout.splitlines()
    assert lines[-1] == "message       CANNOT BE READ, the stored bytes are damaged"
