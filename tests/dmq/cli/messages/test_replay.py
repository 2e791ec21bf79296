"""``dmq replay``: the command, the real daemon's part in this process, and a scripted name server and broker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.forges.messages.stored import a_stored
from support.forges.trail.files import CellWriter, Event
from support.rigs.broker.rig import TOPIC
from support.rigs.commands.live_cell import NOW, LiveCell
from support.rigs.rocketmq.remoting_peer import HeldQueue, Peer, remoting_peer
from typer.testing import Result

from broker_adapter.contracts.message import pack_id
from broker_adapter.remoting import client as remoting
from broker_adapter.remoting.protocol.codes import Operation
from broker_adapter.remoting.protocol.frames import RemotingFrame
from broker_adapter.wire.delay import DELAY_LEVEL, DELIVER_AT_MS, INNER_GROUP, INNER_TOPIC
from broker_adapter.wire.delay import TOPIC as REAL_TOPIC
from dmq.admin.client import DaemonUnavailable
from dmq.cli.messages import replay
from dmq.cluster.inner import InnerTopic
from dmq.states import MessageState

HOUR_MS = 3_600_000
ORDINARY = {REAL_TOPIC: TOPIC, DELIVER_AT_MS: str(NOW + HOUR_MS)}


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """A cluster with an empty inner topic of two queues; nobody waits long before asking again."""
    monkeypatch.setattr(replay, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(remoting, "_PAUSES_S", (0.0, 0.0))
    with remoting_peer() as found:
        found.topics[INNER_TOPIC] = [HeldQueue(), HeldQueue()]
        yield found


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon that takes messages from the inner topic; its cluster is never asked."""
    rig = live.rig
    live.cell.inner = InnerTopic(
        None,  # type: ignore[arg-type]  # nothing is fetched
        rig.broker,
        rig.store.clock,
        topic=INNER_TOPIC,
        group=INNER_GROUP,
        levels_ms=(1_000, 5_000),
        delay_max_ms=None,
    )
    return live


def put(
    peer: Peer,
    queue_id: int,
    message_id: str,
    stored_at_ms: int,
    properties: Mapping[str, str] = ORDINARY,
    body: bytes = b"hello",
) -> None:
    """Store a message in the inner topic."""
    queue = peer.topics[INNER_TOPIC][queue_id]
    message = a_stored(
        body,
        topic=INNER_TOPIC,
        message_id=message_id,
        properties=properties,
        queue_id=queue_id,
        offset=queue.end,
        stored_at_ms=stored_at_ms,
    )
    queue.messages.append(message)


def due_at(at_ms: int) -> dict[str, str]:
    """Properties of a message that is due then."""
    return {REAL_TOPIC: TOPIC, DELIVER_AT_MS: str(at_ms)}


def play(daemon: LiveCell, peer: Peer, *options: str) -> Result:
    """Run the command for what was stored within the last hour."""
    return daemon.run("replay", "--since", str(NOW - HOUR_MS), "--namesrv", peer.address, "--yes", *options)


def counts(result: Result) -> dict[str, Any]:
    """What the command counted, without what it found none of."""
    found = json.loads(result.stdout)
    return {name: value for name, value in found.items() if value not in (0, [], False)}


def state(daemon: LiveCell, message_id: str) -> tuple[MessageState, int]:
    """Where the daemon has a message, and when it is due."""
    from dmq.admin.operations.messages import MessageCalls

    found = daemon.do(MessageCalls(daemon.rig.store, daemon.rig.broker).find(TOPIC, message_id))
    return found.state, found.deliver_at_ms


def test_messages_stored_since_are_kept(daemon: LiveCell, peer: Peer) -> None:
    """As the daemon would have fetched it: its time, its level, its id; what lies before is left; twice is once."""
    put(peer, 0, "OLD", NOW - 2 * HOUR_MS)
    put(peer, 0, "A", NOW - 2_000)
    put(peer, 1, "B", NOW - 500, {REAL_TOPIC: TOPIC, DELAY_LEVEL: "2"})
    put(peer, 1, "C", NOW - 400, due_at(NOW - 300))
    assert counts(play(daemon, peer, "-o", "json")) == {"read": 3, "accepted": 3}
    assert state(daemon, "OLD")[0] is MessageState.UNKNOWN
    assert state(daemon, "A") == (MessageState.WAITING, NOW + HOUR_MS)
    assert state(daemon, "B") == (MessageState.WAITING, NOW + 4_500)
    assert state(daemon, "C")[0] is not MessageState.UNKNOWN
    again = play(daemon, peer)
    assert [line.split() for line in again.stdout.splitlines()][:3] == [
        ["read", "3"],
        ["accepted", "0"],
        ["known", "already", "3"],
    ]
    assert again.exit_code == 0


def test_the_order_is_that_of_their_storing(daemon: LiveCell, peer: Peer) -> None:
    """Over all queues, whatever number of them one pull brings; nothing of the group is asked of the cluster."""
    peer.pull_max = 2
    for number in range(50):
        put(peer, number % 2, f"M{number}", NOW - 1_000 + number)
    given: list[str] = []
    daemon.before_call(given.append)
    assert counts(play(daemon, peer, "-o", "json", "--until", str(NOW - 990))) == {"read": 10, "accepted": 10}
    assert counts(play(daemon, peer, "-o", "json")) == {"read": 50, "accepted": 40, "known": 10}
    assert given == ["ReplayMessages"] * 3
    assert {each.code for each in peer.asked} <= {
        *(Operation.ROUTE, Operation.BEGIN_OFFSET, Operation.END_OFFSET, Operation.OFFSET_AT, Operation.PULL)
    }


def test_times_already_due_are_skipped(daemon: LiveCell, peer: Peer) -> None:
    """One without a time is due when it was stored. A dry run says the same and changes nothing."""
    put(peer, 0, "A", NOW - 5_000, due_at(NOW - 4_000))
    put(peer, 0, "B", NOW - 4_500, {REAL_TOPIC: TOPIC})
    put(peer, 0, "C", NOW - 4_000, due_at(NOW + 1_000))
    put(peer, 0, "D", NOW - 3_000, {"x": "y"}, b"who knows")
    put(peer, 0, "E", NOW - 500, {REAL_TOPIC: TOPIC})
    option = ("-o", "json", "--due-after", str(NOW - 1_000))
    dry = play(daemon, peer, *option, "--dry-run")
    expected = {"read": 5, "accepted": 2, "due_before": 2, "unreadable": 1}
    assert {name: value for name, value in counts(dry).items() if name in expected} == expected
    assert state(daemon, "C")[0] is MessageState.UNKNOWN
    run = play(daemon, peer, *option)
    assert {name: value for name, value in counts(run).items() if name in expected} == expected
    assert state(daemon, "C")[0] is MessageState.WAITING
    assert state(daemon, "A")[0] is state(daemon, "B")[0] is MessageState.UNKNOWN
    dry = play(daemon, peer, *option, "--dry-run")
    assert counts(dry)["known"] == 2


def test_unreadable_input_is_reported(daemon: LiveCell, peer: Peer) -> None:
    """By the daemon, which has it as a dead letter, or by the command; the others are kept, and it ends in part."""
    put(peer, 0, "A", NOW - 5_000, {"x": "y"}, b"who knows")
    put(peer, 0, "B", NOW - 4_000)
    peer.topics[INNER_TOPIC][0].messages.append(a_stored(crc=1, offset=2, stored_at_ms=NOW - 3_000))
    put(peer, 0, "x" * 300, NOW - 2_000)
    put(peer, 0, "C", NOW - 1_000)
    result = play(daemon, peer)
    assert result.exit_code == 7
    assert "A: message is corrupted: it has no property DMQ_TOPIC" in result.stderr
    assert "offset 2: its body is damaged" in result.stderr
    assert "offset 3: its id is blank or too long" in result.stderr
    assert state(daemon, "B")[0] is state(daemon, "C")[0] is MessageState.WAITING
    letters = daemon.run("dead", "ls", INNER_GROUP, "-o", "json")
    assert [each["message_id"] for each in json.loads(letters.stdout)] == ["A"]


def test_trails_leave_out_events_that_need_no_replay(daemon: LiveCell, peer: Peer, tmp_path: Path) -> None:
    """What was forwarded, and what others have; the rest of the lost one's, and what no trail has, is kept."""
    trail = tmp_path / "trail"
    tell(trail, "gone", [("FETCHED", "A"), ("FETCHED", "B"), ("FORWARDED", "A"), ("RECALLED", "E")])
    tell(trail, "well", [("FETCHED", "C"), ("FORWARD_REFUSED", "D")])
    manifest = trail / "manifest" / "cell=well" / "2026-01-01.jsonl"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text("{\n", encoding="utf-8")  # one unreadable line stops nothing
    for number, message_id in enumerate("ABCDE"):
        put(peer, 0, message_id, NOW - 1_000 + number)
    result = play(daemon, peer, "-o", "json", "--trail", str(trail), "--lost", "gone")
    assert counts(result) == {"read": 5, "accepted": 2, "ended": 2, "theirs": 1}
    assert state(daemon, "B")[0] is state(daemon, "D")[0] is MessageState.WAITING
    assert counts(play(daemon, peer, "-o", "json", "--trail", str(trail)))["theirs"] == 2
    wrong = play(daemon, peer, "--trail", str(trail), "--lost", "other")
    assert (wrong.exit_code, "no trail has a cell other; there are: gone, well" in wrong.stderr) == (3, True)
    assert play(daemon, peer, "--lost", "gone").exit_code == 2
    assert play(daemon, peer, "--trail", str(tmp_path / "none")).exit_code == 3


def tell(trail: Path, cell: str, events: list[tuple[str, str]]) -> None:
    """Write a trail of a cell."""
    writer = CellWriter(trail, cell)
    for sequence, (kind, message_id) in enumerate(events, 1):
        made: dict[str, Any] = dict.fromkeys(Event._fields)
        made |= {"sequence": sequence, "boot": 1, "kind": kind, "at_ms": NOW, "attempt": 1}
        writer.add(Event(**(made | {"topic": TOPIC, "message_id": pack_id(message_id)})))
    writer.close()


def test_a_daemon_that_goes_away_is_asked_again(daemon: LiveCell, peer: Peer) -> None:
    """For a while; then the command says what was done and where to go on, and from there nothing is missed."""
    for number in range(40):
        put(peer, 0, f"M{number}", NOW - 1_000 + number)
    fails = iter([False, True, False])

    def fail(name: str) -> None:
        if next(fails, True):
            raise DaemonUnavailable("gone")

    daemon.before_call(fail)
    assert counts(play(daemon, peer, "-o", "json"))["accepted"] == 40
    fails = iter([False])
    result = play(daemon, peer)
    reached_ms = NOW - 1_000 + 31
    assert result.exit_code == 6
    assert f"gone; until then 32 known already; continue with --since {reached_ms}" in result.stderr


def test_a_failing_cluster_is_reported(daemon: LiveCell, peer: Peer) -> None:
    """A read is tried again; one that never succeeds ends the command with where to go on."""
    for number in range(3):
        put(peer, 0, f"M{number}", NOW - 1_000 + number)
    answers = iter([RemotingFrame(code=1, remark="disk")])
    peer.before = lambda request: next(answers, None) if request.code == Operation.PULL else None
    assert counts(play(daemon, peer, "-o", "json"))["accepted"] == 3
    peer.before = lambda request: RemotingFrame(code=1, remark="disk") if request.code == Operation.PULL else None
    result = play(daemon, peer)
    assert (result.exit_code, "disk (1, from" in result.stderr) == (6, True)
    assert "nothing was given to the daemon" in result.stderr
    peer.topics.clear()
    assert play(daemon, peer).exit_code == 3


def test_a_range_removed_by_retention_is_reported(daemon: LiveCell, peer: Peer) -> None:
    """A queue whose first message was stored later than asked for, and what went while it was read."""
    queue = peer.topics[INNER_TOPIC][0]
    queue.begin = 7
    for number in range(4):
        put(peer, 0, f"M{number}", NOW - 1_000 + number)
    peer.pull_max = 1

    def remove(request: RemotingFrame) -> None:
        if request.code == Operation.PULL and request.fields["queueOffset"] == "8":
            del queue.messages[:2]
            queue.begin = 9

    peer.before = remove
    result = play(daemon, peer)
    assert "queue 0 at broker-a: the cluster has removed the messages before offset 7" in result.stderr
    assert [line.split() for line in result.stdout.splitlines()][-1] == ["gone", "meanwhile", "1"]


def test_a_daemon_without_an_inner_topic_refuses(live: LiveCell, peer: Peer) -> None:
    """Nothing is kept."""
    put(peer, 0, "A", NOW - 1_000)
    result = play(live, peer)
    assert (result.exit_code, "has no inner topic" in result.stderr) == (1, True)
    assert state(live, "A")[0] is MessageState.UNKNOWN


def test_a_daemon_refuses_messages_from_outside_its_inner_topic(daemon: LiveCell, peer: Peer) -> None:
    """Nothing is kept."""
    put(peer, 0, "A", NOW - 1_000)
    peer.topics["other"] = peer.topics[INNER_TOPIC]
    result = play(daemon, peer, "--inner-topic", "other")
    assert (result.exit_code, "it is not the inner topic, got 'other'" in result.stderr) == (1, True)
    assert state(daemon, "A")[0] is MessageState.UNKNOWN


def test_events_that_come_during_a_read_are_left_to_the_daemon(daemon: LiveCell, peer: Peer) -> None:
    """It ends where the queues ended when it began."""
    put(peer, 0, "A", NOW - 1_000)
    peer.before = lambda request: put(peer, 0, "B", NOW) if request.code == Operation.PULL else None
    assert counts(play(daemon, peer, "-o", "json")) == {"read": 1, "accepted": 1}


@pytest.mark.parametrize(
    "options",
    [
        ("--since", "yesterday", "--namesrv", "a:1"),
        ("--since", "-1h", "--namesrv", "a"),
        ("--since", "-1h", "--until", "-2h", "--namesrv", "a:1"),
        ("--since", "-1h", "--namesrv", "a:1", "--cluster-access-key", "k"),
        ("--since", "-1h", "--namesrv", "a:1", "--cluster-tls-ca", "/none"),
        ("--since", "-1h"),
    ],
)
def test_wrong_options_are_usage_errors(live: LiveCell, options: tuple[str, ...]) -> None:
    """Before anybody is asked."""
    assert live.run("replay", *options).exit_code == 2
