"""``dmq spool`` in process: what it prints, filters, refuses and ends with."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support.rigs.commands.fake_admin_client import error_of
from support.rigs.commands.fake_admin_client import run_dmq as run

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.spool import Spool, SpoolOptions
from retry.sink import Death, Entry

NOW = SystemClock().now_ms()  # long before the tests when all are run: what counts from then leaves room
MADE = 1_700_000_000_000
DAY = 86_400_000


def uid_of(number: int) -> str:
    return f"{number:032x}"


def entry_of(number: int, *, type_name: str = "orders", payload: bytes = b"", key: str = "", due_ms: int = 0) -> Entry:
    return Entry(
        type_name=type_name,
        uid=bytes.fromhex(uid_of(number)),
        payload=payload or b"payload %d" % number,
        key=key,
        created_at_ms=MADE + number,
        due_at_ms=due_ms or NOW + number * DAY,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six that wait, two of them behind another of their key, and two dead ones."""
    root = tmp_path_factory.mktemp("made")
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        for number in (1, 2):
            spool.put(entry_of(number, type_name="bills", due_ms=NOW - DAY)).result(10)
            (held,) = spool.take("bills", 1, 10)
            spool.bury(held, Death.PERMANENT if number == 1 else Death.EXHAUSTED, "refused: \x1b[31mno").result(10)
        spool.put(entry_of(3, payload=b'{"a": [1, "\xc3\xa4"]}', key="k")).result(10)
        spool.put(entry_of(4, payload=b"\xff\xfe\x00" * 20, key="k")).result(10)
        spool.put(entry_of(5, payload=b"two\nlines \x1b[2J", key="k")).result(10)
        for number in (6, 7, 8):
            spool.put(entry_of(number, type_name="bills" if number == 8 else "orders")).result(10)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "root"))


def ids(root: Path, *arguments: str) -> list[int]:
    result = run("spool", "ls", "--root", str(root), "-o", "id", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return [int(line, 16) for line in result.stdout.splitlines()]


# -- ls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ([], [3, 6, 7, 8, 4, 5]),
        (["--type", "bills"], [8]),
        (["--type", "bills", "--type", "orders"], [3, 6, 7, 8, 4, 5]),
        (["--key", "k"], [3, 4, 5]),
        (["--dead"], [1, 2]),
        (["--dead", "--type", "orders"], []),
        (["--due-before", "+156h"], [3, 6, 4, 5]),
        (["--due-before", str(NOW + 6 * DAY)], [3, 4, 5]),
        (["--due-before", "-1h"], []),
    ],
)
def test_filters(root: Path, options: list[str], numbers: list[int]) -> None:
    """What waits by its due time, then what is parked; words of one option are alternatives, options narrow."""
    assert ids(root, *options) == numbers


def test_a_table_for_people(root: Path) -> None:
    """One line each, times as everywhere, nothing in it moves the cursor."""
    result = run("spool", "ls", "--root", str(root), "--dead")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["DUE", "TYPE", "UID", "KEY", "STATE", "MADE", "ATTEMPTS", "LAST", "ERROR"]
    assert re.search(r"permanent  \d+d( \d+h)? ago +1  refused: \\x1b\[31mno$", lines[1])
    assert "exhausted" in lines[2]
    assert len(lines) == 3


def test_json_and_json_lines_have_the_same_content(root: Path) -> None:
    """A list, or an object a line, with the same keys; the global option works as well."""
    as_list = json.loads(run("spool", "ls", "--root", str(root), "-o", "json").stdout)
    as_lines = [json.loads(line) for line in run("spool", "ls", "--root", str(root), "-o", "jsonl").stdout.splitlines()]
    assert as_list == as_lines == json.loads(run("-o", "json", "spool", "ls", "--root", str(root)).stdout)
    (directory,) = [path.name for path in root.glob("spool-*")]
    assert as_list[0] == {
        "directory": directory,
        "state": "waiting",
        "type": "orders",
        "uid": uid_of(3),
        "key": "k",
        "created_at_ms": MADE + 3,
        "due_at_ms": NOW + 3 * DAY,
        "attempts": 0,
        "is_uncertain": False,
        "error": "",
        "death": None,
        "died_at_ms": None,
        "body_bytes": 16,
    }
    assert [each["state"] for each in as_list] == ["waiting"] * 4 + ["parked"] * 2
    assert run("spool", "ls", "--root", str(root), "-o", "json", "--key", "none").stdout == "[]\n"


def test_a_truncated_list_is_marked(root: Path) -> None:
    """On stderr; the directory is let go although it was not read to its end."""
    result = run("spool", "ls", "--root", str(root), "-o", "id", "--limit", "2")
    assert result.stdout.split() == [uid_of(3), uid_of(6)]
    assert result.stderr == "dmq: the first 2; --limit shows more\n"
    assert not list(root.glob(".work-*"))


def test_the_folder_can_come_from_the_environment(root: Path) -> None:
    """As a service has it set for its hook."""
    result = run("spool", "ls", "-o", "id", "--dead", env={"DMQ_SPOOL": str(root)})
    assert result.stdout.split() == [uid_of(1), uid_of(2)]


@pytest.mark.parametrize("command", ["ls", "stats", "check", "export", "salvage", "adopt"])
def test_a_folder_that_is_not_there(tmp_path: Path, command: str) -> None:
    """Exit code 3, one line, and it is not made; a folder that is there and is no spool's neither is one."""
    result = run("spool", command, "--root", str(tmp_path / "none"), "-o", "json")
    assert result.exit_code == 3
    assert error_of(result)["message"] == f"there is no spool at {tmp_path / 'none'}"
    result = run("spool", command, "--root", str(tmp_path))
    told = f"dmq: there is no spool at {tmp_path}: no process ever made a directory spool-... in it\n"
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", told)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "--due-before", "tomorrow"),
        ("ls", "--limit", "0"),
        ("show", "12"),
        ("show", "x" * 32),
        ("show", uid_of(3), "--bytes", "much"),
        ("requeue",),
        ("requeue", uid_of(1), "--all"),
        ("requeue", uid_of(1), "--type", "bills"),
    ],
)
def test_wrong_usage(root: Path, arguments: tuple[str, ...]) -> None:
    """Exit code 2, one line that says where to look."""
    result = run("spool", *arguments, "--root", str(root))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"see 'dmq spool {arguments[0]} --help'" in result.stderr


# -- show --------------------------------------------------------------------------------------------------------------


def facts_of(text: str) -> dict[str, str]:
    """One fact a line, two spaces or more between its name and what it says."""
    pairs = [line.split("  ", 1) for line in text.splitlines()]
    return {name: fact.strip() for name, fact in pairs}


def shown(root: Path, number: int, *options: str) -> tuple[dict[str, str], list[str]]:
    result = run("spool", "show", uid_of(number), "--root", str(root), *options)
    assert (result.exit_code, result.stderr) == (0, "")
    facts, _, body = result.stdout.partition("\n\n")
    return facts_of(facts), body.splitlines()


def test_a_body_is_shown_by_its_type(root: Path) -> None:
    """JSON indented, text by its lines without control characters, other bytes in hex."""
    facts, body = shown(root, 3)
    assert (facts["type"], facts["key"], facts["state"], facts["body size"]) == ("orders", "k", "waiting", "16 B")
    assert body == ["{", '  "a": [', "    1,", '    "\u00e4"', "  ]", "}"]
    assert shown(root, 5)[1] == ["two", "lines \\x1b[2J"]
    assert shown(root, 4)[1][0].replace(" ", "") == ("fffe00" * 11)[:64]
    assert shown(root, 5, "--hex")[1][0].startswith("74776f0a")


def test_a_long_body_is_cut(root: Path) -> None:
    """At so many bytes, and it says how many are left; in hex as in text."""
    assert shown(root, 4, "--bytes", "4")[1] == ["fffe00ff", "... 56 more bytes; --bytes shows more"]
    assert shown(root, 6, "--bytes", "3B")[1] == ["pay", "... 6 more bytes; --bytes shows more"]


def test_json_that_cannot_be_indented_is_shown_as_text(tmp_path: Path) -> None:
    """With a lone surrogate in it, or nested too deep to be read. Danger: an error, and no body."""
    with Spool(tmp_path, options=SpoolOptions(adopt_every_s=0)) as spool:
        spool.put(entry_of(1, payload=b'{"a": "\\ud800"}')).result(10)
        spool.put(entry_of(2, payload=b"[" * 100_000)).result(10)
    assert shown(tmp_path, 1)[1] == ['{"a": "\\ud800"}']
    assert shown(tmp_path, 2, "--bytes", "3B")[1] == ["[[[", "... 99,997 more bytes; --bytes shows more"]


def test_a_dead_entry_has_the_reason_of_its_end(root: Path) -> None:
    """When, why and after what."""
    facts, _ = shown(root, 1)
    assert facts["died"].endswith(": permanent")
    assert (facts["attempts"], facts["last error"]) == ("1", "refused: \\x1b[31mno")
    (found,) = json.loads(run("spool", "show", uid_of(1), "--root", str(root), "-o", "json").stdout)
    assert (found["death"], found["body_text"]) == ("permanent", "payload 1")


def test_an_entry_that_is_not_there(root: Path) -> None:
    """Exit code 3; dashes in a uid do not matter."""
    result = run("spool", "show", "00000000-0000-0000-0000-0000000000ff", "--root", str(root))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "there is no entry" in result.stderr
    assert run("spool", "show", "00000000-0000-0000-0000-000000000003", "--root", str(root)).exit_code == 0


# -- stats and check ---------------------------------------------------------------------------------------------------


def test_stats(root: Path) -> None:
    """Per directory and type, and a histogram of what is due."""
    (found,) = json.loads(run("spool", "stats", "--root", str(root), "-o", "json").stdout)
    assert found["state"] == "free"
    bills, orders = found["types"]
    assert (bills["type_name"], bills["waiting"], bills["parked"], bills["dead"]) == ("bills", 1, 0, 2)
    assert (orders["type_name"], orders["waiting"], orders["parked"], orders["dead"]) == ("orders", 5, 2, 0)
    assert orders["oldest_at_ms"] == MADE + 3
    assert sum(bucket["count"] for bucket in orders["due"]) == 3
    table = run("spool", "stats", "--root", str(root)).stdout
    assert [line.count("#") for line in table.splitlines()[-4:]] == [40, 40, 40, 40]


def test_stats_name_users_of_a_directory_and_damage(root: Path) -> None:
    """A pid, ``free``, or why it cannot be opened."""
    broken = next(iter(root.glob("spool-*")))
    with Spool(root, options=SpoolOptions(adopt_every_s=0)):
        (found,) = json.loads(run("spool", "stats", "--root", str(root), "-o", "json").stdout)
        assert found["state"] == f"pid {os.getpid()}"
        assert [each["waiting"] for each in found["types"]] == [1, 5]
    (broken / "CELL").write_text("{", encoding="utf-8")
    (found,) = json.loads(run("spool", "stats", "--root", str(root), "-o", "json").stdout)
    assert (found["state"].startswith("damaged: "), found["types"]) == (True, [])


def test_a_check_of_a_sound_directory(root: Path) -> None:
    """Exit code 0, also while a process uses it."""
    result = run("spool", "check", "--root", str(root))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith(" rows, 6 waiting, 2 dead: whole\n")
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        spool.put(entry_of(9)).result(10)
        assert "7 waiting, 2 dead: whole" in run("spool", "check", "--root", str(root)).stdout


def test_a_check_of_a_missing_or_foreign_directory(root: Path) -> None:
    """Exit code 4, what is wrong, and what to do; as with 'dmq store check'."""
    (table, *_) = [path for path in root.glob("spool-*/rocksdb/*.sst") if b"two\nlines" in path.read_bytes()]
    content = bytearray(table.read_bytes())
    content[content.index(b"two\nlines")] ^= 1
    table.write_bytes(content)
    result = run("spool", "check", "--root", str(root))
    assert result.exit_code == 4
    assert "NOT whole" in result.stdout
    assert "cannot be read: Corruption: block checksum mismatch" in result.stdout
    assert "('dmq spool check' lists the damage, 'dmq spool salvage' recovers the readable entries)" in result.stdout
    assert result.stderr == "dmq: 1 of 1 directories are damaged; 'dmq spool salvage' recovers readable entries\n"
    assert json.loads(run("spool", "check", "--root", str(root), "-o", "json").stdout)[0]["findings"]


def test_earlier_names_still_work(root: Path) -> None:
    """They do the same, and the help does not show them."""
    (directory,) = root.glob("spool-*")
    (directory / "rocksdb" / "CURRENT").unlink()
    for name in ("verify", "check"):
        assert run("spool", name, "--root", str(root)).exit_code == 4
    assert run("spool", "repair", "--root", str(root), "--yes").exit_code == 0
    assert run("spool", "verify", "--root", str(root)).exit_code == 0
    told = run("spool", "--help").stdout
    assert [name in told for name in ("check", "salvage", "verify", "repair")] == [True, True, False, False]


# -- export ------------------------------------------------------------------------------------------------------------


def test_export(root: Path, tmp_path: Path) -> None:
    """Everything, bodies in base64, and as text where they are; a file is for its owner only."""
    result = run("spool", "export", "--root", str(root), "--out", str(tmp_path / "all.jsonl"))
    assert (result.exit_code, result.stdout) == (0, f"8 entries in {tmp_path / 'all.jsonl'}\n")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [int(line["uid"], 16) for line in lines] == [3, 6, 7, 8, 4, 5, 1, 2]
    assert base64.b64decode(lines[4]["body"]) == b"\xff\xfe\x00" * 20
    assert (lines[4]["body_text"], lines[5]["body_text"]) == (None, "two\nlines \x1b[2J")
    assert (tmp_path / "all.jsonl").stat().st_mode & 0o777 == 0o600
    dead = run("spool", "export", "--root", str(root), "--dead").stdout.splitlines()
    assert [json.loads(line)["death"] for line in dead] == ["permanent", "exhausted"]


def test_export_of_a_damaged_letter(root: Path) -> None:
    """What can be read, and exit code 4."""
    (directory,) = root.glob("spool-*")
    (directory / "rocksdb" / "CURRENT").unlink()
    result = run("spool", "export", "--root", str(root))
    assert result.exit_code == 4
    assert len(result.stdout.splitlines()) == 8
    assert "rebuilt manifest" in result.stderr


# -- salvage, requeue, adopt-------------------------------------------------------------------------------------------


def test_a_salvage_asks_first(root: Path) -> None:
    """Which directories are damaged, and how. Nobody can be asked here: --yes is needed; a dry run needs none."""
    (directory,) = root.glob("spool-*")
    (directory / "CELL").write_text("{", encoding="utf-8")
    result = run("spool", "salvage", "--root", str(root))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"the readable entries of 1 directory of {root} would be recovered: {directory.name} (" in result.stderr
    assert "use --yes" in result.stderr
    dry = run("spool", "salvage", "--root", str(root), "--dry-run")
    assert (dry.exit_code, dry.stdout.startswith(f"{directory}: damaged: ")) == (0, True)
    assert list(root.glob("spool-*")) == [directory]


@pytest.mark.parametrize("options", [(), ("--yes",), ("--dry-run",)])
def test_a_salvage_of_a_sound_directory(root: Path, options: tuple[str, ...]) -> None:
    """It says so, and leaves it; nobody is asked about nothing."""
    result = run("spool", "salvage", "--root", str(root), *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith(": whole, left as it is\n")


def test_a_salvage_reports_the_saved_rows(root: Path) -> None:
    """For people and for programs, and where the damaged directory went."""
    (directory,) = root.glob("spool-*")
    (directory / "CELL").write_text("{", encoding="utf-8")
    result = run("spool", "salvage", directory.name, "--root", str(root), "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    (new,) = root.glob("spool-*")
    facts = facts_of(result.stdout)
    assert facts["saved"] == f"6 waiting, 2 dead, in {new}"
    assert facts["missing"] == "0 entries"
    aside = root / directory.name.replace("spool", "damaged")
    assert facts["kept"] == f"{aside}, report in {aside}.json"
    assert aside.is_dir()
    assert json.loads((root / f"{aside.name}.json").read_text(encoding="utf-8"))["waiting"] == 6
    assert ids(root) == [3, 6, 7, 8, 4, 5]


def test_a_salvage_of_a_used_or_missing_directory(root: Path) -> None:
    """6 for a process that may end, 3 for a name that is none; without a name those in use are left alone."""
    assert run("spool", "salvage", "spool-none", "--root", str(root), "--yes").exit_code == 3
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        result = run("spool", "salvage", spool.path.name, "--root", str(root), "--yes")
        assert result.exit_code == 6
        assert result.stderr == f"dmq: {spool.path} is in use by another process (pid {os.getpid()})\n"
        result = run("spool", "salvage", "--root", str(root), "--yes")
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == f"dmq: skipped: {spool.path} is in use by another process (pid {os.getpid()})\n"


def test_requeue_by_uid(root: Path) -> None:
    """It waits again, due now, as if it had never failed; a uid that is not dead is named, and it ends in part."""
    dry = run("spool", "requeue", uid_of(1), uid_of(3), "--root", str(root), "--dry-run", "--json")
    told = {"requeued": 1, "not_found": 1, "missing": [uid_of(3)], "left_alone": [], "is_dry_run": True}
    assert (dry.exit_code, json.loads(dry.stdout), ids(root, "--dead")) == (7, told, [1, 2])
    result = run("spool", "requeue", uid_of(1), uid_of(3), "--root", str(root))
    assert (result.exit_code, result.stdout) == (7, "1 entry waits again\n")
    assert result.stderr == f"dmq: not dead in a free directory: {uid_of(3)}\n"
    assert ids(root, "--dead") == [2]
    (found,) = json.loads(run("spool", "show", uid_of(1), "--root", str(root), "-o", "json").stdout)
    assert (found["state"], found["attempts"]) == ("waiting", 0)
    assert run("spool", "check", "--root", str(root)).exit_code == 0
    assert run("spool", "requeue", uid_of(1), "--root", str(root)).exit_code == 3


def test_requeue_of_all(root: Path) -> None:
    """Asked about first, with how many; a type narrows it, and nobody is asked about none."""
    asked = run("spool", "requeue", "--all", "--root", str(root))
    assert (asked.exit_code, "dmq: 2 dead entries in the free directories" in asked.stderr) == (2, True)
    for options in ((), ("--yes",)):
        none = run("spool", "requeue", "--all", "--type", "orders", "--root", str(root), *options)
        assert (none.exit_code, none.stdout[:2]) == (0, "0 ")
    result = run("spool", "requeue", "--all", "--type", "bills", "--root", str(root), "--yes", "-o", "json")
    assert json.loads(result.stdout) == {"requeued": 2, "not_found": 0, "missing": [], "left_alone": []}
    assert ids(root, "--dead") == []


def test_requeue_behind_a_process(root: Path) -> None:
    """Refused with its pid: the process itself can do it."""
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        result = run("spool", "requeue", uid_of(1), "--root", str(root))
        assert (result.exit_code, result.stdout) == (6, "")
        assert f"{spool.path} is in use by another process (pid {os.getpid()})" in result.stderr


def test_adoption_from_another_spool(root: Path, tmp_path: Path) -> None:
    """A volume that somebody left: its entries are in this spool afterwards, its directory is gone."""
    target = tmp_path / "target"
    target.mkdir()
    asked = run("spool", "adopt", "--root", str(target), "--from", str(root))
    assert (asked.exit_code, f"dmq: 8 entries of 1 directory of {root} would be moved" in asked.stderr) == (2, True)
    dry = run("spool", "adopt", "--root", str(target), "--from", str(root), "--dry-run")
    assert (dry.exit_code, dry.stdout[:9], list(target.iterdir())) == (0, "8 entries", [])
    result = run("spool", "adopt", "--root", str(target), "--from", str(root), "--yes")
    (new,) = target.glob("spool-*")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"8 entries of 1 directory now in {new}\n"
    assert sorted(ids(target)) == [3, 4, 5, 6, 7, 8]
    assert ids(target, "--dead") == [1, 2]
    assert not list(root.glob("spool-*"))
    assert run("spool", "check", "--root", str(target)).exit_code == 0


def test_adoption_gives_the_reason_of_a_refusal(root: Path, tmp_path: Path) -> None:
    """Nothing to merge, in use, damaged: each is named, and nothing is touched."""
    result = run("spool", "adopt", "--root", str(root))
    assert (result.exit_code, result.stdout) == (0, f"nothing to take over in {root}: only one directory is free\n")
    target = tmp_path / "target"
    target.mkdir()
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        result = run("spool", "adopt", "--root", str(target), "--from", str(root), "-o", "json")
        used = f"{spool.path.name} is in use by pid {os.getpid()}"
        assert json.loads(result.stdout) == {"into": "", "entries": 0, "adopted": [], "left_alone": [used]}
    (directory,) = root.glob("spool-*")
    (directory / "CELL").write_text("{", encoding="utf-8")
    result = run("spool", "adopt", "--root", str(target), "--from", str(root), "-o", "json")
    (left,) = json.loads(result.stdout)["left_alone"]
    assert left.startswith(f"{directory.name} is damaged: ")
    assert result.exit_code == 4
