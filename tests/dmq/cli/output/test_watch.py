"""Commands that run until they are ended, at a terminal and in a pipe, on a real daemon that is restarted meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import typer.main
from support.rigs.commands.command_tree import keep
from support.rigs.commands.terminal import AtTerminal, piped, plain
from support.rigs.daemon.process import Daemon, run_command

from dmq.cli.app import app
from dmq.cli.output import watch
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.watch import Outage, interval_s

pytestmark = pytest.mark.integration

QUICK = ("--interval", "200ms")
LISTS = {"broker", "dead groups", "dead jobs", "msg jobs", "retry stats", "spool stats"}  # besides each ``ls``


class Site(NamedTuple):
    """A daemon, and the environment in which commands find it."""

    daemon: Daemon
    env: Mapping[str, str]

    def run(self, *arguments: str) -> None:
        """Run a command that succeeds."""
        done = run_command(*arguments, env=self.env)
        assert done.returncode == 0, done.stderr

    def at(self, columns: int, *arguments: str) -> AtTerminal:
        """Run a command at a terminal."""
        return AtTerminal(*arguments, columns=columns, env=self.env)

    def piped(self, *arguments: str) -> subprocess.Popen[str]:
        """Run a command with a pipe for its output."""
        return piped(*arguments, env=self.env)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A daemon with two topics, one of them paused, and a group."""
    home = tmp_path_factory.mktemp("watch")
    with Daemon(home / "data", processes=1) as daemon:
        site = Site(daemon, {"DMQ_ADDRESS": daemon.address, "DMQ_CONFIG_DIR": str(home)})
        site.run("topic", "create", "orders")
        site.run("topic", "create", "refunds-of-the-northern-shops")
        site.run("topic", "pause", "refunds-of-the-northern-shops")
        site.run("msg", "send", "refunds-of-the-northern-shops", "x", "--delay", "1h")
        site.run("group", "create", "billing")
        yield site


def has(text: str) -> Any:  # noqa: ANN401 - a predicate of screens
    return lambda lines: any(text in line for line in lines)


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_top_fits_the_terminal(site: Site, columns: int) -> None:
    """State, rates, due times, topics with their pauses and groups, at each width, until q."""
    with site.at(columns, "top", *QUICK) as top:
        found = top.until(has("accepted 0"))
        assert max(map(len, found)) <= columns
        words = " ".join(found)
        for each in ("every 0.2s", "serving", "within an hour", "paused", "1 topic", "PENDING", "RETRYING", "billing"):
            assert each in words, found
        (row,) = (line.split() for line in found if line.startswith("refunds"))
        assert row[1:3] == ["paused", "1"]
        top.press("q")
        assert top.end() == 0
        left = plain(top.written.rpartition("\x1b[?1049l")[2])
        assert "serving" in left
        assert "billing" in left


def test_a_list_follows_changes_resizes_and_a_restart(site: Site) -> None:
    """New rows appear, a resize redraws the list, an outage is shown and ends, Ctrl-C leaves the list."""
    with site.at(120, "topic", "ls", "--watch", *QUICK) as ls:
        assert max(map(len, ls.until(has("TOPIC")))) > 80
        site.run("msg", "send", "orders", "x", "--delay", "1h")
        ls.until(lambda lines: any(line.split()[:4] == ["orders", "8", "0", "1"] for line in lines))
        ls.resize(80)
        found = ls.until(lambda lines: len(lines[0]) == 80)
        assert max(map(len, found)) <= 80
        assert any("STATE" in line for line in found)
        site.daemon.stop()
        assert has("orders")(ls.until(has("no daemon answers")))
        site.daemon.restart()
        ls.until(lambda lines: has("TOPIC")(lines) and not has("no daemon answers")(lines))
        ls.press("\x03")
        assert ls.end() == 0
        assert plain(ls.written.rpartition("\x1b[?1049l")[2]).split()[:2] == ["TOPIC", "QUEUES"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(site: Site, number: signal.Signals) -> None:
    """The screen and the modes of the terminal are as before."""
    with site.at(80, "group", "ls", "--watch", *QUICK) as ls:
        ls.until(has("billing"))
        ls.signal(number)
        assert ls.end() == 128 + number


def test_programs_get_a_line_of_json_each_time(site: Site) -> None:
    """Also of top; a reader that leaves ends the command without a traceback."""
    for arguments in (("topic", "ls", "--watch"), ("top",)):
        with site.piped(*arguments, *QUICK, "-o", "json") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first, second = (json.loads(process.stdout.readline()) for _ in range(2))
            assert type(first) is type(second)
            process.stdout.close()
            assert json.loads(process.stderr.read())["error"]["message"] == "the output was closed"
            assert process.wait(30) == 1


def test_a_pipe_gets_one_table_after_another(site: Site) -> None:
    """With an empty line between two, all columns, and no control characters."""
    with site.piped("topic", "ls", "--watch", *QUICK) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().rstrip("\n") for _ in range(8)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert lines[3] == lines[7] == ""
    assert lines[:3] == lines[4:7]
    assert lines[0].split() == ["TOPIC", "QUEUES", "STORED", "PENDING", "TYPE", "STATE", "QUOTAS"]


def test_the_first_failure_ends_the_command(site: Site) -> None:
    """A wrong address is not waited for."""
    done = run_command("topic", "ls", "--watch", "--address", "127.0.0.1:1", env=site.env)
    assert (done.returncode, done.stdout) == (6, "")


def test_every_list_can_be_watched() -> None:
    """By one implementation: all of them have the same two options."""
    keep()
    for name, group in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]  # the root is a group
        for verb, command in getattr(group, "commands", {}).items():
            options = {option for parameter in command.params for option in parameter.opts}
            is_list = verb == "ls" or name in LISTS or f"{name} {verb}" in LISTS
            assert is_list == ({"--watch", "-w"} <= options) == ("--watch" in options), (name, verb)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--interval", "2s"), "it requires --watch"),
        (("--watch", "--interval", "99ms"), "at least 100ms is expected"),
        (("--watch", "--interval", "2"), "a duration needs a unit"),
    ],
)
def test_a_wrong_interval_is_wrong_usage(options: tuple[str, ...], text: str) -> None:
    """Before anything is asked."""
    done = run_command("topic", "ls", *options)
    assert (done.returncode, done.stdout, text in done.stderr) == (2, "", True), done.stderr


def test_an_outage_is_reported_once() -> None:
    """At its begin and at its end; the first failure and other errors are raised."""
    told: list[str] = []
    outage = Outage(told.append)
    with pytest.raises(CommandFailed), outage:
        raise CommandFailed("gone", ExitCode.UNAVAILABLE)
    outage.answered()
    for _ in range(2):
        with outage:
            raise CommandFailed("gone", ExitCode.UNAVAILABLE)
    assert (told, outage.error) == (["gone; trying again"], "gone")
    outage.answered()
    assert (told[1:], outage.error) == (["the daemon answers again"], "")
    with pytest.raises(CommandFailed), outage:
        raise CommandFailed("not found", ExitCode.NOT_FOUND)


def test_lines_that_do_not_fit_are_counted() -> None:
    """A screen of 10 lines: title, an empty line, 7 lines of output, a note."""
    page = watch._page("\n".join(f"line {number}" for number in range(20)), "title", "", 40, 10)
    lines = page.plain.splitlines()
    assert len(lines) == 10
    assert lines[-2:] == ["line 6", "... 13 more lines; a taller terminal shows them"]
    assert interval_s("1500ms") == 1.5
