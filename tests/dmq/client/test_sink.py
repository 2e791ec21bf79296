"""``SidecarClient`` against real daemons: what it promises beyond the contract of sinks, and what happens to it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.process import Daemon

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_duration
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.client import SidecarClient
from dmq.client import holds as client_holds
from dmq.client.calls import DaemonCalls, Told
from dmq.client.entries import GROUP, message_id_of, topic_of
from dmq.client.holds import LeaseHold
from retry.policy import MAX_ATTEMPTS_LIMIT
from retry.sink import Death, Entry, Held, SinkClosed, SinkError, SinkFull, SinkUnavailable

pytestmark = pytest.mark.integration
PATIENCE_S = 15.0
HOUR_MS = 3_600_000
TYPE = "orders"
CLOCK = SystemClock()


def an_entry(number: int = 1, *, in_ms: int = 0, key: str = "", payload: bytes = b"payload") -> Entry:
    """An entry due ``in_ms`` from now."""
    now_ms = CLOCK.now_ms()
    uid = number.to_bytes(16, "big")
    return Entry(type_name=TYPE, uid=uid, payload=payload, key=key, created_at_ms=now_ms, due_at_ms=now_ms + in_ms)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[SidecarClient]:
    """A client of this test's daemon."""
    with SidecarClient(daemon.address) as made:
        yield made


@pytest.fixture
def other(daemon: Daemon) -> Iterator[SidecarClient]:
    """Another one, as another process would have."""
    with SidecarClient(daemon.address) as made:
        yield made


def put(client: SidecarClient, *entries: Entry) -> None:
    """Put entries, each durable."""
    for entry in entries:
        assert client.put(entry).result(PATIENCE_S) is None


def take_one(client: SidecarClient) -> Held:
    """Take the next entry."""
    (held,) = client.take(TYPE, 1, PATIENCE_S)
    return held


def number_of(held: Held) -> int:
    """Return the number of an entry."""
    return int.from_bytes(held.entry.uid, "big")


def test_clients_share_the_waiting_bytes(client: SidecarClient, other: SidecarClient) -> None:
    """One puts, another takes; what one holds the other does not get; what one closes with, the other gets at once."""
    put(client, an_entry())
    held = take_one(other)
    assert not client.take(TYPE, 1, 0.3)
    other.close()
    again = take_one(client)
    assert again.entry == held.entry, "giving back at close is no attempt"


def test_a_repeated_put_is_stored_once(client: SidecarClient) -> None:
    """In doubt, a caller may repeat it: the message id is made from the uid."""
    put(client, an_entry(), an_entry(), an_entry(2, in_ms=HOUR_MS), an_entry(2, in_ms=HOUR_MS))
    client.finish(take_one(client)).result(PATIENCE_S)
    assert not client.take(TYPE, 1, 0.3)
    assert client.stats(TYPE).waiting == 1


def test_order_holds_among_clients(daemon: Daemon) -> None:
    """Three clients, failing now and then: entries of each key are sent in their order, each once."""
    keys = {number: f"key {number % 5}" for number in range(1, 101)}
    sent: dict[str, list[int]] = {}
    lock = threading.Lock()
    seed = random.randrange(2**32)
    print("seed", seed)

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        with SidecarClient(daemon.address) as mine:
            while sum(map(len, sent.values())) < len(keys):
                for held in mine.take(TYPE, 8, 0.2):
                    if rng.random() < 0.2:
                        due_at_ms = CLOCK.now_ms() + rng.randrange(20)
                        mine.again(held, due_at_ms, is_counted=rng.random() < 0.5).result(PATIENCE_S)
                        continue
                    with lock:
                        sent.setdefault(held.entry.key, []).append(number_of(held))
                    mine.finish(held).result(PATIENCE_S)

    with SidecarClient(daemon.address) as client:
        put(client, *(an_entry(number, key=key) for number, key in keys.items()))
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, number) for number in range(3)]:
            done.result(60)
    assert sent == {key: [number for number in keys if keys[number] == key] for key in set(keys.values())}


def test_every_key_goes_through_the_daemon(client: SidecarClient) -> None:
    """Only the daemon knows what other processes left there."""
    assert client.has_waiting(TYPE, "a")
    assert not client.has_waiting(TYPE, "")


def test_a_long_hold_is_kept_in_the_daemon(
    daemon: Daemon, client: SidecarClient, other: SidecarClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a moment it is a row there: a daemon that was killed does not give the entry to somebody else."""
    extended = threading.Event()
    hide = client_holds.hide

    def watched(calls: DaemonCalls, hold: LeaseHold, invisible_ms: int, *, is_suspended: bool, told: Told) -> None:
        def seen(answer: object, failure: SinkError | None) -> None:
            told(answer, failure)
            if failure is None and is_suspended and invisible_ms:
                extended.set()

        hide(calls, hold, invisible_ms, is_suspended=is_suspended, told=seen)

    monkeypatch.setattr(client_holds, "hide", watched)
    put(client, an_entry())
    held = take_one(client)
    assert extended.wait(PATIENCE_S)
    daemon.kill()
    daemon.restart()
    assert not until_up(lambda: other.take(TYPE, 1, 0.5))
    due_at_ms = CLOCK.now_ms()
    until_up(lambda: client.again(held, due_at_ms, is_counted=False).result(PATIENCE_S))
    assert take_one(other).entry.attempts == 0


def test_an_entry_in_hand_is_not_taken_twice(daemon: Daemon, client: SidecarClient) -> None:
    """Should the daemon hand it out again to the same process, that goes on with the new handle."""
    put(client, an_entry())
    held = take_one(client)
    ticket = held.ticket
    assert isinstance(ticket, LeaseHold)
    request = wire.ChangeInvisibleDurationRequest(receipt_handle=ticket.handle, message_id=ticket.message_id)
    request.group.name, request.topic.name = GROUP, topic_of(TYPE)
    set_duration(request.invisible_duration, 0)
    with WireClient(daemon.address) as meddler:
        assert meddler.ask("ChangeInvisibleDuration", request).status.code == wire.OK
    assert not client.take(TYPE, 1, 0.5)
    client.finish(held).result(PATIENCE_S)
    assert client.lost_total == 0
    client.close()
    with SidecarClient(daemon.address) as fresh:
        assert not fresh.take(TYPE, 1, 0.3)


def test_results_come_in_another_thread(client: SidecarClient) -> None:
    """A callback that uses the client again does not wait for itself."""
    threads: list[int] = []
    answered = threading.Event()

    def told(_: object) -> None:
        threads.append(threading.get_ident())
        client.put(an_entry(2)).add_done_callback(lambda _: answered.set())

    client.put(an_entry()).add_done_callback(told)
    assert answered.wait(PATIENCE_S)
    assert threading.get_ident() not in threads


def test_far_repetitions_are_stored_again(daemon: Daemon, client: SidecarClient) -> None:
    """Longer than a message can be hidden: it waits on the timeline, with its attempts, and the old one is gone."""
    put(client, an_entry())
    due_at_ms = CLOCK.now_ms() + 24 * HOUR_MS
    client.again(take_one(client), due_at_ms, is_counted=True, error="down").result(PATIENCE_S)
    with AdminClient(daemon.address) as admin:
        found = admin.message(topic_of(TYPE), message_id_of(an_entry().uid, 1))
        assert (found.state, found.deliver_at_ms) == (admin_v1.WAITING, due_at_ms)
        assert found.content.properties["DMQ_ATTEMPTS"] == "1"
        assert found.content.properties["DMQ_ERROR"] == "down"
        assert admin.group(GROUP).leased == 0


def until_up(call: Callable[[], object]) -> object:
    """Repeat a call while the daemon is not reached yet."""
    until_s = CLOCK.monotonic_s() + PATIENCE_S
    while True:
        try:
            return call()
        except SinkUnavailable:
            if CLOCK.monotonic_s() > until_s:
                raise


def test_an_absent_daemon_is_reported_at_once(daemon: Daemon, client: SidecarClient) -> None:
    """By puts, takes, results and figures; and the same client finds it again."""
    put(client, an_entry())
    held = take_one(client)
    daemon.kill()
    started_s = CLOCK.monotonic_s()
    assert isinstance(client.put(an_entry(2)).exception(PATIENCE_S), SinkUnavailable)
    assert isinstance(client.finish(held).exception(PATIENCE_S), SinkUnavailable)
    with pytest.raises(SinkUnavailable):
        client.take(TYPE, 1, 10.0)
    for ask in (client.stats, lambda: client.dead(TYPE), lambda: client.requeue(TYPE, [held.entry.uid])):
        with pytest.raises(SinkUnavailable):
            ask()
    assert CLOCK.monotonic_s() - started_s < 5.0
    daemon.restart()
    until_up(lambda: client.put(an_entry(2)).result(PATIENCE_S))
    client.finish(held).result(PATIENCE_S)
    assert number_of(take_one(client)) == 2
    assert not client.take(TYPE, 1, 0.3)


def test_a_daemon_that_is_killed_ends_a_wait(daemon: Daemon, client: SidecarClient) -> None:
    """Whoever waits in a take hears of it, and what was put before is there afterwards."""
    put(client, an_entry(in_ms=2_000))
    assert not client.take(TYPE, 1, 0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.take, TYPE, 1, 1.9)
        daemon.kill()
        with suppress(SinkUnavailable):
            assert not waiting.result(PATIENCE_S)
    daemon.restart()
    assert number_of(until_up(lambda: take_one(client))) == 1  # type: ignore[arg-type]


def test_a_daemon_that_hangs_is_not_waited_for(daemon: Daemon) -> None:
    """A call ends at its deadline, and so does closing."""
    with SidecarClient(daemon.address, timeout_s=1.0) as client:
        put(client, an_entry())
        take_one(client)
        daemon.signal(signal.SIGSTOP)
        try:
            started_s = CLOCK.monotonic_s()
            assert isinstance(client.put(an_entry(2)).exception(PATIENCE_S), SinkUnavailable)
            client.close()
            assert CLOCK.monotonic_s() - started_s < 8.0
        finally:
            daemon.signal(signal.SIGCONT)


def test_no_server_listens(tmp_path: Path) -> None:
    """A client may be made before its daemon is there."""
    daemon = Daemon(tmp_path / "data").start()
    daemon.stop()
    with SidecarClient(daemon.address) as client:
        assert isinstance(client.put(an_entry()).exception(PATIENCE_S), SinkUnavailable)
        daemon.restart()
        try:
            until_up(lambda: client.put(an_entry()).result(PATIENCE_S))
            assert number_of(take_one(client)) == 1
        finally:
            daemon.close()


def test_a_full_daemon_is_full(data: Path) -> None:
    """Its refusal for a bound is ``SinkFull``: nothing was kept, and later it may be."""
    with Daemon(data, "--disk-low-water-bytes", "1000TiB") as daemon, SidecarClient(daemon.address) as client:
        assert isinstance(client.put(an_entry()).exception(PATIENCE_S), SinkFull)


def test_a_message_that_can_never_be_kept_is_refused(client: SidecarClient) -> None:
    """A payload over the protocol's size, and a name that no topic can have."""
    assert isinstance(client.put(an_entry(payload=bytes(4 * 1024 * 1024 + 1))).exception(PATIENCE_S), SinkFull)
    bad = client.put(replace(an_entry(), type_name="no spaces")).exception(PATIENCE_S)
    assert type(bad) is SinkError
    put(client, an_entry(payload=bytes(4 * 1024 * 1024)))
    assert len(take_one(client).entry.payload) == 4 * 1024 * 1024


def test_names_as_long_as_topics_may_be(client: SidecarClient) -> None:
    """The prefix of the topic takes nothing from a type's name, and long ones are not mixed up."""
    long, other = "t" * 127, "t" * 126 + "u"
    put(client, replace(an_entry(1), type_name=long), replace(an_entry(2), type_name=other))
    (held,) = client.take(long, 2, PATIENCE_S)
    assert (number_of(held), held.entry.type_name) == (1, long)
    client.bury(held, Death.PERMANENT, "no").result(PATIENCE_S)
    assert [each.entry for each in client.dead(long)] == [replace(held.entry, attempts=1, error="no")]


def test_a_message_that_is_no_entry_is_dead(daemon: Daemon, client: SidecarClient) -> None:
    """Somebody sent it to the topic: its bytes are kept, and it holds nobody up."""
    with WireClient(daemon.address) as stranger:
        stranger.send(a_message(topic_of(TYPE), "stray", b"what is this"))
    put(client, an_entry())
    assert number_of(take_one(client)) == 1
    until_s = CLOCK.monotonic_s() + PATIENCE_S
    while not (dead := client.dead(TYPE)):
        assert CLOCK.monotonic_s() < until_s
        assert not client.take(TYPE, 1, 0.1)
    assert [(each.death, each.entry.payload) for each in dead] == [(Death.UNREADABLE, b"what is this")]


def test_a_death_is_known_to_all(client: SidecarClient, other: SidecarClient) -> None:
    """Why, with which error and after how many attempts: also to who did not bury it."""
    put(client, an_entry())
    held = take_one(client)
    client.bury(held, Death.PERMANENT, "no such customer").result(PATIENCE_S)
    (dead,) = other.dead(TYPE)
    assert (dead.death, dead.entry) == (
        Death.PERMANENT,
        replace(held.entry, attempts=1, error="no such customer"),
    )


def test_a_masked_entry_is_no_entry(tmp_path: Path) -> None:
    """A daemon that masks the store's topics is named: its dead entries are not those that were sent."""
    with (
        Daemon(tmp_path / "data", env={**os.environ, "DMQ_REDACT": "redelivery_*"}) as daemon,
        SidecarClient(daemon.address) as client,
    ):
        put(client, an_entry())
        client.bury(take_one(client), Death.PERMANENT, "no").result(PATIENCE_S)
        with pytest.raises(SinkUnavailable, match="exclude it from its setting redact"):
            client.dead(TYPE)


def test_the_daemon_never_gives_up_first(daemon: Daemon, client: SidecarClient) -> None:
    """The group's policy allows as many attempts as any policy can; one that an operator set stays."""
    put(client, an_entry())
    with AdminClient(daemon.address) as admin:
        assert admin.group(GROUP).policy.max_attempts == MAX_ATTEMPTS_LIMIT
        admin.set_group(GROUP, policy=admin_v1.Policy(fixed=admin_v1.FixedBackoff(delay_ms=0), max_attempts=50))
        with SidecarClient(daemon.address) as later:
            put(later, an_entry(2))
        assert admin.group(GROUP).policy.max_attempts == 50


def test_more_attempts_than_the_daemons_default(client: SidecarClient) -> None:
    """Its default would bury after 17."""
    put(client, an_entry())
    for attempts in range(30):
        held = take_one(client)
        assert held.entry.attempts == attempts
        client.again(held, CLOCK.now_ms(), is_counted=True).result(PATIENCE_S)


def test_a_daemon_whose_groups_begin_at_the_end(data: Path) -> None:
    """What was put before anybody ever took is not skipped."""
    with Daemon(data, "--group-start", "latest") as daemon, SidecarClient(daemon.address) as client:
        put(client, an_entry())
        assert number_of(take_one(client)) == 1


def test_a_child_of_a_fork_is_refused(client: SidecarClient) -> None:
    """It says so at once, closes without harm, and the parent's client goes on."""
    put(client, an_entry())
    held = take_one(client)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused = [client.put(an_entry(2)).exception(0), client.finish(held).exception(0)]
            try:
                client.take(TYPE, 1, 0.0)
            except SinkClosed as error:
                refused.append(error)
            client.close()
            code = 0 if [type(each) for each in refused] == [SinkClosed] * 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.finish(held).result(PATIENCE_S)
    put(client, an_entry(3))
    assert number_of(take_one(client)) == 3


def test_close_leaves_no_threads(daemon: Daemon) -> None:
    """Also with entries in hand, and a take that waits."""
    before = {thread.name for thread in threading.enumerate()}
    client = SidecarClient(daemon.address)
    put(client, an_entry())
    take_one(client)
    with ThreadPoolExecutor(1, thread_name_prefix="taker") as pool:
        waiting = pool.submit(client.take, TYPE, 1, 10.0)
        client.close()
        assert not waiting.result(PATIENCE_S)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if name.startswith("dmq-")]


def test_missing_packages_are_named() -> None:
    """Whoever installed the base distribution only is told what to install."""
    code = "import sys; sys.modules['grpc'] = None\nimport dmq.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert "pip install 'rock-dmq[client]'" in done.stderr.splitlines()[-1]
