"""Dead letters on the command line, without a daemon: lists, single ones, files."""

from __future__ import annotations

import base64
import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.admin_source import DAMAGED, LETTERS, MESSAGE, letter
from support.admin_status import NOW
from support.fake_admin_client import FakeClient, error_of, install
from support.fake_admin_client import run_dmq as run

from broker_adapter.wire.mapping import encode
from dmq.admin.client import DaemonUnavailable
from dmq.cli import progress


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


def listed(*arguments: str) -> list[int]:
    result = run("dead", "ls", "billing", *arguments, "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    return [found["offset"] for found in json.loads(result.stdout)]


def test_groups_with_dead_letters(daemon: type[FakeClient]) -> None:
    """Those without are left out; one that was removed is there, and says so."""
    lines = [line.split() for line in run("dead", "groups").stdout.splitlines()]
    assert lines == [["GROUP", "DEAD", "STATE"], ["billing", "3"], ["gone", "2", "removed"]]
    assert json.loads(run("dead", "groups", "-o", "json").stdout) == [
        {"group": "billing", "dead": 3, "removed": False},
        {"group": "gone", "dead": 2, "removed": True},
    ]


def test_dead_letters_are_listed_in_the_order_of_their_death(daemon: type[FakeClient]) -> None:
    """When, of what, and why; those with an outcome only if asked for."""
    assert run("dead", "ls", "billing").stdout.splitlines() == [
        "DEAD AT                   LAST FAILED               TOPIC    MESSAGE ID  REASON     ATTEMPTS  TAG  KEYS",
        "2023-11-14T22:17:20.001Z  2023-11-14T22:17:20.000Z  orders   D4          exhausted        17  new  k1 k4",
        "2023-11-14T22:18:20.001Z  2023-11-14T22:18:20.000Z  refunds  D5          too_old          17  new  k1 k5",
        "2023-11-14T22:21:20.001Z  2023-11-14T22:21:20.000Z           D8          sent here         0  new  k1 k8",
    ]
    lines = run("dead", "ls", "billing", "--all-outcomes").stdout.splitlines()
    assert lines[0].endswith("KEYS   OUTCOME")
    assert lines[3].endswith("k1 k6  redriven")
    found = json.loads(run("dead", "ls", "billing", "-o", "json").stdout)
    assert (found[0]["reason"], found[2]["reason"]) == ("EXHAUSTED", "REASON_UNSPECIFIED")
    assert found[0]["content"]["body"] is None


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        (["--reason", "too_old"], [5]),
        (["--reason", "TOO_OLD", "--reason", "exhausted"], [4, 5]),
        (["--topic", "orders", "--topic", "x"], [4]),
        (["--key", "k8", "--key", "k4"], [4, 8]),
        (["--since", "2023-11-14T22:18:20Z"], [5, 8]),
        (["--until", "1700000300000"], [4]),
        (["--since", "2023-11-14T22:18:20Z", "--until", "2023-11-14T22:18:20.001Z"], [5]),
        (["--all-outcomes"], [4, 5, 6, 8]),
        (["--limit", "3", "--all-outcomes"], [4, 5, 6]),
    ],
)
def test_filters(daemon: type[FakeClient], options: list[str], offsets: list[int]) -> None:
    """Words of one option are alternatives, options together narrow."""
    assert listed(*options) == offsets


def test_times_can_be_ages_by_the_clock_of_the_daemon(daemon: type[FakeClient]) -> None:
    """So long ago, whatever this host believes."""
    daemon.source.cell = replace(daemon.source.cell, now_ms=NOW + 3_600_000 + 300_000)
    assert listed("--since", "-1h") == [5, 8]
    assert listed("--until", "-1h") == [4]
    assert listed("--since=-100000d") == [4, 5, 8]


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
def test_wrong_usage_lists_nothing(daemon: type[FakeClient], options: tuple[str, ...]) -> None:
    """Exit code 2, one line that says where to look."""
    result = run("dead", "ls", "billing", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "see 'dmq dead ls --help'" in result.stderr
    assert "ListDeadLetters" not in daemon.calls


def test_a_list_goes_on_over_short_and_empty_pages(daemon: type[FakeClient]) -> None:
    """One call looks at a bounded number of letters; the end is where the daemon says so."""
    daemon.source.rows_per_call = 1
    assert listed("--key", "k8") == [8]
    assert daemon.calls.count("ListDeadLetters") == 4


def test_a_list_that_was_cut_says_so(daemon: type[FakeClient]) -> None:
    """On stderr, and no more is read than is shown."""
    result = run("dead", "ls", "billing", "--limit", "1")
    assert (len(result.stdout.splitlines()), result.stderr) == (2, "dmq: the first 1; --limit shows more\n")
    assert daemon.calls.count("ListDeadLetters") == 1
    assert run("dead", "ls", "billing", "--limit", "9").stderr == ""


def test_everything_about_one(daemon: type[FakeClient]) -> None:
    """Where it came from, why and when it died, what became of it, and what it is; the body only if asked for."""
    daemon.source.cell = replace(daemon.source.cell, now_ms=NOW + 7_200_000)
    lines = run("dead", "show", "billing", "D6").stdout.splitlines()
    assert lines == [
        "message id     D6",
        "origin topic   orders",
        "reason         exhausted",
        "attempts       17",
        "first failed   2023-11-14T21:13:20.000Z (3h ago)",
        "last failed    2023-11-14T22:19:20.000Z (1h 54m ago)",
        "dead at        2023-11-14T22:19:20.001Z (1h 54m ago)",
        "offset         6",
        "outcome        redriven 2023-11-14T23:52:20.000Z (21m ago): orders R1",
        "tag            new",
        "keys           k1 k2",
        "message group  g",
        "properties     a=1 b=2",
        "born           2023-11-14T22:13:19.999Z on here",
        "body size      14 B",
    ]
    assert "outcome        none" in run("dead", "show", "billing", "D4").stdout
    assert run("dead", "show", "billing", "D6", "--body").stdout.endswith("body           café \\x1b[31mred\n")
    (found,) = json.loads(run("dead", "show", "billing", "D6", "--body", "-o", "json").stdout)
    assert base64.b64decode(found["content"]["body"]) == MESSAGE.body


def test_a_message_that_died_twice_is_shown_twice(daemon: type[FakeClient]) -> None:
    """Once for each death."""
    again = replace(letter(9), dead=replace(letter(9).dead, message_id="D4"))
    daemon.source.letters.append(again)
    blocks = run("dead", "show", "billing", "D4").stdout.split("\n\n")
    assert [block.splitlines()[7].split() for block in blocks] == [["offset", "4"], ["offset", "9"]]
    assert len(json.loads(run("dead", "show", "billing", "D4", "-o", "json").stdout)) == 2


def test_one_that_cannot_be_read_is_shown_as_what_it_is(daemon: type[FakeClient]) -> None:
    """With what is known of it from elsewhere."""
    daemon.source.letters = [replace(LETTERS[0], payload=DAMAGED)]
    lines = run("dead", "show", "billing", "D4").stdout.splitlines()
    assert lines[-3:] == [
        "tag           new",
        "keys          k1 k4",
        "message       CANNOT BE READ, the stored bytes are damaged",
    ]


def test_one_that_was_purged_is_shown_without_its_message(daemon: type[FakeClient]) -> None:
    """What it said is gone on purpose; why, is not."""
    purged = replace(LETTERS[0], payload=b"", outcome="purged", outcome_at_ms=NOW, outcome_note="too old")
    daemon.source.letters = [purged]
    lines = run("dead", "show", "billing", "D4", "--body").stdout.splitlines()
    assert "outcome       purged 2023-11-14T22:13:20.000Z (in 0ms): too old" in lines
    assert lines[-1] == "message       gone with its purge"
    for body, last in ((b"", "message        its body went with its purge"), (b"x", "body           x")):
        daemon.source.letters = [replace(purged, payload=encode(replace(MESSAGE, body=body)).payload)]
        assert run("dead", "show", "billing", "D4", "--body").stdout.splitlines()[-1] == last


def test_one_that_is_not_dead_is_not_found(daemon: type[FakeClient]) -> None:
    """Exit code 3, one line; an object for programs; so is an unknown group."""
    result = run("dead", "show", "billing", "alive")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "dmq: message alive is no dead letter of group billing\n"
    assert error_of(run("dead", "show", "billing", "alive", "-o", "json"))["kind"] == "not_found"
    for command in (("ls", "nobody"), ("show", "nobody", "D4"), ("export", "nobody")):
        assert run("dead", *command).exit_code == 3


def test_an_export_is_json_lines(daemon: type[FakeClient]) -> None:
    """One object a line, in ASCII, with bodies in base64; those with an outcome are left out."""
    daemon.source.rows_per_call = 1
    result = run("dead", "export", "billing")
    assert (result.exit_code, result.stderr, result.stdout.isascii()) == (0, "", True)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["message_id"] for each in found] == ["D4", "D5", "D8"]
    assert {base64.b64decode(each["content"]["body"]) for each in found} == {MESSAGE.body}
    result = run("dead", "export", "billing", "--id", "D5", "--id", "D8", "--reason", "too_old")
    assert [json.loads(line)["message_id"] for line in result.stdout.splitlines()] == ["D5"]


def test_long_work_says_where_it_is(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On stderr, for people only."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert run("dead", "ls", "billing", "--key", "k4").stderr == "dmq: dead letters of billing: 1 found\n"
    assert run("dead", "export", "billing", "--key", "k4").stderr == "dmq: export of billing: 1 letters\n"
    for command in (("ls", "billing"), ("show", "billing", "D4"), ("export", "billing")):
        assert run("dead", *command, "-o", "json").stderr == ""


def test_an_export_to_a_file(daemon: type[FakeClient], tmp_path: Path) -> None:
    """The file is replaced whole; bodies are for the owner's eyes only."""
    file = tmp_path / "dead.jsonl"
    file.write_text("old", encoding="utf-8")
    result = run("dead", "export", "billing", "--out", str(file), "-o", "json")
    assert json.loads(result.stdout) == {"group": "billing", "file": str(file), "letters": 3, "unreadable": 0}
    assert [json.loads(line)["offset"] for line in file.read_text(encoding="utf-8").splitlines()] == [4, 5, 8]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    result = run("dead", "export", "billing", "--id", "D4", "--out", str(file))
    assert result.stdout == f"1 dead letter of billing in {file}\n"


def test_an_export_that_fails_leaves_the_old_file(daemon: type[FakeClient], tmp_path: Path) -> None:
    """Half of one is worse than none; nothing else is left either."""
    file = tmp_path / "dead.jsonl"
    file.write_text("old", encoding="utf-8")
    daemon.source.rows_per_call = 1

    def fail_at_the_second(name: str) -> None:
        if daemon.calls.count("ListDeadLetters") == 2:
            raise DaemonUnavailable("gone")

    daemon.before_call = staticmethod(fail_at_the_second)
    result = run("dead", "export", "billing", "--out", str(file))
    assert (result.exit_code, result.stdout, result.stderr) == (6, "", "dmq: gone\n")
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_export_goes_where_a_link_points(daemon: type[FakeClient], tmp_path: Path) -> None:
    """The link stays a link."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    assert run("dead", "export", "billing", "--out", str(link)).exit_code == 0
    assert (link.is_symlink(), len(file.read_text(encoding="utf-8").splitlines())) == (True, 3)


def test_an_export_replaces_files_only(daemon: type[FakeClient], tmp_path: Path) -> None:
    """A device or a directory would be gone; a missing directory is a mistake of the command line."""
    for target in ("/dev/null", str(tmp_path), str(tmp_path / "missing" / "x")):
        result = run("dead", "export", "billing", "--out", target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--out" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/null").is_file()


def test_what_cannot_be_read_is_exported_as_such_and_told(daemon: type[FakeClient], tmp_path: Path) -> None:
    """The others are complete, and the exit code says that not all are."""
    daemon.source.letters[0] = replace(LETTERS[0], payload=DAMAGED)
    file = tmp_path / "dead.jsonl"
    result = run("dead", "export", "billing", "--out", str(file))
    assert (result.exit_code, result.stderr) == (1, "dmq: 1 of 3 cannot be read, their content is null\n")
    found = [json.loads(line)["content"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert (found[0], [each is None for each in found]) == (None, [True, False, False])
