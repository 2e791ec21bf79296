"""New messages of a topic, at a terminal and in a pipe, on a real daemon that is restarted meanwhile."""

from __future__ import annotations

import json
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
from support.forges.messages.letters import a_message
from support.rigs.commands.live_cell import LiveCell
from support.rigs.commands.terminal import AtTerminal, piped, plain
from support.rigs.daemon.process import Daemon, run_command

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused
from dmq.cli.messages.tail import TailFilter, TailPosition


class Site(NamedTuple):
    """A daemon, and the environment in which commands find it."""

    daemon: Daemon
    env: Mapping[str, str]

    def send(self, body: str, *options: str) -> str:
        """Send a message and return its id."""
        done = run_command("msg", "send", "orders", body, *options, env=self.env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def tail(self, *options: str) -> subprocess.Popen[str]:
        """Follow the topic into a pipe."""
        return piped("tail", "orders", *options, env=self.env)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A daemon with an empty topic."""
    home = tmp_path_factory.mktemp("tail")
    with Daemon(home / "data", processes=1) as daemon:
        site = Site(daemon, {"DMQ_ADDRESS": daemon.address, "DMQ_CONFIG_DIR": str(home)})
        assert run_command("topic", "create", "orders", env=site.env).returncode == 0
        yield site


@pytest.mark.integration
def test_a_tail_goes_on_where_it_was_after_a_restart(site: Site) -> None:
    """No message is missing or repeated, delayed ones come when they are due; the outage is two lines on stderr."""
    with site.tail("-o", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = _until_it_follows(site, process)
        site.daemon.stop()
        assert "no daemon answers" in process.stderr.readline()
        site.daemon.restart()
        sent = [site.send("x", "--key", "order-1"), site.send("y"), site.send("z", "--delay", "1s")]
        found = [json.loads(process.stdout.readline()) for _ in sent]
        assert sorted(each["message_id"] for each in found) == sorted(sent)
        assert first not in sent
        assert found[-1]["message_id"] == sent[-1]
        assert found[-1]["stored_at_ms"] >= found[-1]["deliver_at_ms"] > 0
        assert "answers again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""


def _until_it_follows(site: Site, process: subprocess.Popen[str]) -> str:
    """Send until the command prints a message: it began before that one. Read all that were sent; return the first."""
    assert process.stdout is not None
    sent = []
    while not select.select([process.stdout], [], [], 0)[0]:
        sent.append(site.send("probe"))
    first: str = json.loads(process.stdout.readline())["message_id"]
    for _ in sent[sent.index(first) + 1 :]:
        process.stdout.readline()
    return first


@pytest.mark.integration
@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_line_fits_the_terminal(site: Site, columns: int) -> None:
    """Time, id, queue and offset, tag and keys; lateness and size where there is room. Ctrl-C ends it."""
    with AtTerminal("tail", "orders", "--tag", "created", columns=columns, env=site.env) as tail:
        sent: list[str] = []
        while not any(each in tail.written for each in sent):
            sent.append(site.send("hello", "--tag", "created", "--key", "order-4711", "--delay", "1ms"))
            site.send("other")
        tail.press("\x03")
        assert tail.end() == 0
    (line, *_) = (line for line in plain(tail.written).splitlines() if "created" in line)
    assert len(line) <= columns
    assert line.split()[3:5] == ["created", "order-4711"]
    assert ("late" in line) == (columns > 80), line


@pytest.mark.integration
def test_a_limit_and_a_closed_pipe_end_it(site: Site) -> None:
    """After the last message at once; without a reader also if no message comes."""
    with site.tail("--limit", "1") as process:
        assert process.stdout is not None
        while process.poll() is None:
            site.send("x")
        assert process.returncode == 0
        assert len(process.stdout.read().splitlines()) == 1
    with site.tail() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "dmq: the output was closed\n"
        assert process.wait(30) == 1


def send(live: LiveCell, *names: str) -> None:
    """Send messages with their names as ids and bodies."""

    async def work() -> None:
        for each in names:
            await live.rig.broker.send([a_message(each, body=each.encode())])

    live.do(work())


@pytest.fixture
def client(live: LiveCell) -> Iterator[AdminClient]:
    """A client of a daemon with the topic ``orders`` of three queues."""
    send(live, "OLD")
    with AdminClient(live.cell.listen) as client:
        yield client


def ids(found: list[wire.PeekedMessage]) -> list[str]:
    return [each.message_id for each in found]


def test_a_position_begins_at_the_end(live: LiveCell, client: AdminClient) -> None:
    """Earlier messages are not read; each later one is read once, with its body only if that is wanted."""
    position = TailPosition("orders", with_body=True)
    assert position.read(client) == []
    send(live, "M1", "M2")
    found = position.read(client)
    assert sorted(ids(found)) == ["M1", "M2"]
    assert {each.content.body for each in found} == {b"M1", b"M2"}
    assert position.read(client) == []
    plain = TailPosition("orders", with_body=False)
    plain.read(client)
    send(live, "M3")
    (third,) = plain.read(client)
    assert not third.content.HasField("body")


def test_a_failed_call_loses_nothing(live: LiveCell, client: AdminClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second queue cannot be read, the messages of the first one come with the next call."""
    position = TailPosition("orders", with_body=False)
    position.read(client)
    sent = [f"M{number}" for number in range(9)]
    send(live, *sent)
    peek, calls = client.peek, 0

    def failing(*arguments: object, **options: object) -> wire.PeekMessagesResponse:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise CallRefused("no answer")
        return peek(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "peek", failing)
    with pytest.raises(CallRefused):
        position.read(client)
    assert sorted(ids(position.read(client))) == sent


def test_a_long_backlog_is_read_page_by_page(
    live: LiveCell, client: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call reads a page of each queue, and tells whether there is more."""
    monkeypatch.setattr("dmq.cli.messages.tail._PAGE", 1)
    position = TailPosition("orders", with_body=False)
    position.read(client)
    sent = [f"M{number}" for number in range(7)]
    send(live, *sent)
    found, pages = ids(position.read(client)), 1
    while not position.is_at_end:
        page = position.read(client)
        assert len(page) <= 3
        found += ids(page)
        pages += 1
    assert sorted(found) == sent
    assert pages >= 3


def test_removed_messages_and_another_store_are_reported(
    live: LiveCell, client: AdminClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues at the first message of the queue, of a new queue too, and a note tells why."""
    position = TailPosition("orders", with_body=False)
    position.read(client)
    live.run("topic", "set", "orders", "--queues", "4")
    assert position.read(client) == []
    ranges = [wire.QueueRange(queue_id=0, begin_offset=50, end_offset=50), wire.QueueRange(queue_id=1)]
    counted = wire.CountMessagesResponse(topic="orders", queues=ranges)
    position._offsets = {0: 48, 1: 9}
    monkeypatch.setattr(client, "count", lambda _: counted)
    assert position.read(client) == []
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        "dmq: queue 0: retention removed 2 messages before they were read",
        "dmq: queue 1: the topic was created again, or its store restored",
    ]
    assert position._offsets == {0: 50, 1: 0}


def test_a_filter_compares_tag_and_key() -> None:
    """Both, if both are given; an unreadable message has neither."""
    message = wire.PeekedMessage(content=wire.Content(tag="created", keys=["k1", "k2"]))
    assert TailFilter().has(message)
    assert TailFilter("created", "k2").has(message)
    assert not TailFilter("created", "k3").has(message)
    assert not TailFilter("new").has(message)
    assert TailFilter().has(wire.PeekedMessage())
    assert not TailFilter("created").has(wire.PeekedMessage())
