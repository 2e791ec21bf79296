"""The tables of all commands on a narrow terminal: what names something is whole, and can be pasted back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forges.messages.letters import a_message, die, fail, set_policy
from support.rigs.commands.live_cell import NOW, LiveCell

from dmq.cli.nouns import NOUNS

ROOT = Path(__file__).parents[4]
TOPIC, GROUP, KEY = "orders-of-the-north-eu-" + "x" * 40, "billing-" + "y" * 60, "customer-" + "z" * 50
QUEUED, DELAYED, RETRIED, DEAD = (f"01C0FFEE00C0FFEE0000123400000{number:05}" for number in range(4))


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon with something of everything, of long names."""

    async def fill() -> None:
        await set_policy(live.rig, 3, 60_000, group=GROUP)
        await die(live.rig, a_message(DEAD, topic=TOPIC, keys=(KEY,)), group=GROUP)
        await fail(live.rig, RETRIED, group=GROUP, topic=TOPIC)
        await live.rig.broker.send([a_message(QUEUED, topic=TOPIC, keys=(KEY,))])
        await live.rig.broker.send([a_message(DELAYED, topic=TOPIC, keys=(KEY,), deliver_at_ms=NOW + 60_000)])

    live.do(fill())
    live.run("cron", "add", "every-" + "c" * 40, TOPIC, "body", "--every", "1h")
    live.run("quota", "set", "key", KEY, "topics", "5")
    return live


COMMANDS = {
    "topic ls": {TOPIC},
    f"topic show {TOPIC}": {TOPIC, GROUP},
    f"msg ls {TOPIC}": {QUEUED, DELAYED, KEY},
    f"msg peek {TOPIC}": {QUEUED, KEY},
    f"msg get {TOPIC} {QUEUED}": {QUEUED, TOPIC, KEY},
    f"msg fire {TOPIC} --all --dry-run": {DELAYED, KEY},
    f"msg recall {TOPIC} {DEAD} {QUEUED}": {DEAD, QUEUED},
    "cron ls": {"every-" + "c" * 40, TOPIC},
    "group ls": {GROUP},
    f"group show {GROUP}": {GROUP},
    f"retry ls {GROUP}": {RETRIED, TOPIC},
    "retry stats": {GROUP},
    f"dead ls {GROUP}": {DEAD, TOPIC, KEY},
    f"dead show {GROUP} {DEAD}": {DEAD, TOPIC, KEY},
    "dead groups": {GROUP},
    "dead jobs": set(),
    "quota ls": {KEY},
    "activity ls": set(),
    "ledger --groups": {TOPIC, GROUP},
}


def words_of(lines: str) -> set[str]:
    return {word.rstrip(",:") for word in lines.split()}


def test_names_are_whole_in_every_table(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal is, each id, name and key of an answer is on one line."""
    daemon.run("dead", "redrive", GROUP, "--reason", "exhausted", "--yes")
    for columns in (40, 80, None):
        monkeypatch.setattr("dmq.cli.output.output.terminal_columns", lambda columns=columns: columns)
        for command, names in COMMANDS.items():
            result = daemon.run(*command.split())
            assert result.exception is None or isinstance(result.exception, SystemExit), command
            assert names <= words_of(result.stdout), (command, columns, result.stdout)
    # A retry is named by its entry, which a list prints and a command takes.
    (entry,) = re.findall(r"\b\d{13}-\d+\b", daemon.run("retry", "ls", GROUP).stdout)
    assert daemon.run("retry", "run-now", GROUP, "--entry", entry).exit_code == 0


def test_every_table_is_made_in_one_place() -> None:
    """What holds for one noun holds for all: nothing else in the command line draws a table or wraps a line."""
    for path in sorted((ROOT / "dmq" / "cli").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert path.name == "output.py" or not re.search(r"rich\.(table|columns)|textwrap", source), path.name
    assert NOUNS


def unspecified(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from unspecified(each)
    elif isinstance(value, str) and value.endswith("_UNSPECIFIED"):
        yield value


def test_every_word_that_a_list_shows_is_one_that_its_filter_takes(daemon: LiveCell) -> None:
    """States and reasons, as people and as programs read them; and no program is shown that nothing was said."""
    assert daemon.run("msg", "send", f"%DLQ%{GROUP}", "body").exit_code == 0
    for command in (("msg", "ls", TOPIC), ("dead", "ls", GROUP)):
        found = json.loads(daemon.run(*command, "-o", "json").stdout)
        rows = found["messages"] if isinstance(found, dict) else found
        option = "state" if command[0] == "msg" else "reason"
        words = {each[option] for each in rows}
        assert len(words) == 2
        table = words_of(daemon.run(*command).stdout)
        for word in words:
            assert word.lower() in table
            for spelling in (word, word.lower()):
                chosen = json.loads(daemon.run(*command, f"--{option}", spelling, "-o", "json").stdout)
                kept = chosen["messages"] if isinstance(chosen, dict) else chosen
                assert {each[option] for each in kept} == {word}
    for asked in COMMANDS:
        result = daemon.run(*asked.split(), "-o", "json")
        if result.stdout:
            assert not list(unspecified(json.loads(result.stdout))), asked
