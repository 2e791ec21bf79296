"""What documentation and outputs suggest works, and nothing that others wrote moves the cursor."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from support.forges.messages.letters import a_message, die
from support.forges.messages.schedules import tick
from support.rigs.broker.rig import GROUP
from support.rigs.commands.live_cell import NOW, LiveCell, live_cell

from broker_adapter.runtime.clock import SystemClock
from dmq.cli.output.output import show_json
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address
from dmq.daemon.checks import problems_of
from spark_audit.report.message.files import unpacked


def test_dead_letters_are_named_behind_their_group(live: LiveCell) -> None:
    """As ids elsewhere; --id stays."""
    live.do(die(live.rig, a_message("D1"), a_message("D2"), a_message("D3")))
    would = json.loads(live.run("dead", "redrive", GROUP, "D1", "--id", "D2", "--dry-run", "-o", "json").stdout)
    assert would["done"] == 2
    would = json.loads(live.run("dead", "purge", GROUP, "D3", "--why", "old", "--dry-run", "-o", "json").stdout)
    assert would["done"] == 1
    assert len(live.run("dead", "export", GROUP, "D1").stdout.splitlines()) == 1


def test_a_group_is_reset_to_the_beginning(live: LiveCell) -> None:
    """By either word."""
    live.do(die(live.rig, a_message("D1")))
    for word in ("begin", "beginning"):
        answer = live.run("group", "reset", GROUP, "orders", "--to", word, "--yes", "-o", "json")
        assert set(json.loads(answer.stdout)["offsets"]) == {0}


def test_held_messages_are_listed_by_that_word(live: LiveCell) -> None:
    """Due, and held by the pause of their topic; those that wait for their time are not."""
    live.run("topic", "create", "orders")
    live.run("topic", "pause", "orders")

    async def fill() -> None:
        for each, at_ms in (("due", NOW + 1_000), ("later", NOW + 3_600_000)):
            await live.rig.broker.send([a_message(each, deliver_at_ms=at_ms)])

    live.do(fill())
    live.do(tick(live.rig, 12, 5_000))
    lines = live.run("msg", "ls", "orders", "--state", "held").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["held"]
    assert "due" in lines[1]
    waiting = json.loads(live.run("msg", "ls", "orders", "--state", "waiting", "-o", "json").stdout)["messages"]
    assert {each["message_id"]: each["is_held"] for each in waiting} == {"due": True, "later": False}


def test_quotas_of_bytes_have_units(live: LiveCell) -> None:
    """Both ways; a wrong size is a usage error."""
    shown = live.run("quota", "set", "key", "shop", "bytes", "64MiB").stdout
    assert ("64MiB" in shown, "67108864" in shown) == (True, False)
    assert json.loads(live.run("quota", "ls", "-o", "json").stdout)[0]["limit"] == 64 * 2**20
    assert live.run("quota", "set", "key", "shop", "bytes", "much").exit_code == 2
    assert live.run("quota", "set", "key", "shop", "topics", "-1").exit_code == 2


@pytest.mark.parametrize("char", ["\x9b", "\x1b", "\u202e", "\u2028", "\U000e0041"])
def test_json_moves_no_cursor(capsys: pytest.CaptureFixture[str], char: str) -> None:
    """What a terminal would obey is escaped, all else is as it was sent; a program reads the same."""
    show_json({"key": f"é 漢 {char}"})
    printed = capsys.readouterr().out
    assert (char in printed, "é 漢" in printed) == (False, True)
    assert json.loads(printed) == {"key": f"é 漢 {char}"}


def test_the_uid_of_a_spool_is_hex_also_if_it_begins_with_a_zero() -> None:
    """It is any 16 bytes; an id of text is text."""
    assert unpacked(b"\0order-1") == "order-1"
    assert unpacked(bytes(range(0, 256, 16))) == bytes(range(0, 256, 16)).hex().upper()


def test_a_folder_that_stores_no_files_is_refused_before_the_start(tmp_path: Path) -> None:
    """As serve refuses it later."""
    config = DaemonConfig(listen=Address("127.0.0.1", 0), data=Path("/proc/x"), tls_certificate="off")
    (problem,) = problems_of(config, SystemClock())
    assert problem == "/proc/x cannot be the directory of data: the file system of /proc stores no files"
    assert problems_of(config.model_copy(update={"data": tmp_path / "x"}), SystemClock()) == []


def test_the_first_log_line_for_people_has_the_settings(tmp_path: Path) -> None:
    """And where the data is; a program gets all settings."""
    config = DaemonConfig(listen=Address("127.0.0.1", 0), data=tmp_path, keep_time=timedelta(days=1))
    assert set(config.shown(changed_only=True)) == {"data", "listen", "keep_time"}
    assert len(config.shown()) > 60


def test_a_command_without_a_key_explains_how_to_give_one(tmp_path: Path) -> None:
    """Options, variables and contexts; with a wrong key only what was wrong."""
    acl = tmp_path / "acl.toml"
    acl.write_text('[keys.boss]\nsecret = "s3cret-of-the-boss"\nrole = "admin"\n')
    acl.chmod(0o600)
    secret = tmp_path / "secret"
    secret.write_text("another-secret-of-the-boss")
    secret.chmod(0o600)
    with live_cell(tmp_path / "data", acl=acl) as live:
        told = live.run("topic", "ls")
        assert (told.exit_code, "--access-key" in told.stderr, "dmq context add" in told.stderr) == (5, True, True)
        wrong = live.run("--access-key", "boss", "--secret-file", str(secret), "topic", "ls")
        assert (wrong.exit_code, "--access-key" in wrong.stderr) == (5, False)
