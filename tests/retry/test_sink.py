"""What every sink promises the hook: each sentence of ``retry.sink.DelaySink`` as a test, for all that fit it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon
from support.rigs.producer.sinks import (
    EVERY_SINK,
    PATIENCE_S,
    Make,
    SinkRig,
    an_entry,
    failure_of,
    none_left,
    numbers,
    put,
    result,
    take,
    take_when_due,
    uid_of,
)

from broker_adapter.runtime.clock import SystemClock
from retry.sink import Death, SinkClosed

pytestmark = pytest.mark.contract
SOON_MS = 400
LATER_MS = 3_600_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests; each has a type of its own."""
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as running:
        yield running


@pytest.fixture(params=[make for _, make in EVERY_SINK], ids=[name for name, _ in EVERY_SINK])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkRig]:
    """Each sink, empty as far as this test's type is concerned."""
    make: Make = request.param
    made = make(tmp_path, request.getfixturevalue("daemon") if "sidecar" in request.node.name else None)
    yield made
    made.close()


def test_taken_entries_equal_the_put_ones(rig: SinkRig) -> None:
    """Every field, whatever characters it holds, comes back."""
    entry = an_entry(rig, key="k\n\x7f% ü", attempts=3, is_uncertain=True, error="no\troute % to höst")
    plain = an_entry(rig, 2, payload=b"", created_at_ms=5)
    put(rig, entry, plain)
    assert sorted((each.entry for each in take(rig, 2)), key=lambda each: each.uid) == [entry, plain]


def test_nothing_is_early(rig: SinkRig) -> None:
    """An entry that is not due is not given out, with a key or without."""
    plain, keyed = an_entry(rig, 1, in_ms=SOON_MS), an_entry(rig, 2, in_ms=SOON_MS, key="a")
    put(rig, plain, keyed)
    for held in take_when_due(rig, plain.due_at_ms, SOON_MS, count=2):
        assert rig.sink.clock.now_ms() >= held.entry.due_at_ms


def test_a_message_due_later_stays(rig: SinkRig) -> None:
    """An hour is not over in a moment, nor is a day: longer than the daemon can hide a message."""
    put(rig, an_entry(rig, 1, in_ms=LATER_MS), an_entry(rig, 2, in_ms=LATER_MS, key="a"))
    put(rig, an_entry(rig, 3), an_entry(rig, 4, key="b"))
    held = take(rig, 2)
    assert sorted(numbers(held)) == [3, 4]
    for each in held:
        result(rig.sink.again(each, rig.sink.clock.now_ms() + 24 * LATER_MS, is_counted=True))
    assert none_left(rig)


def test_the_longest_due_is_first(rig: SinkRig) -> None:
    """In the order of the due times, not of arrival."""
    put(rig, *(an_entry(rig, number, in_ms=-1_000 * number) for number in (2, 5, 1, 4, 3)))
    assert numbers(take(rig, 5)) == [5, 4, 3, 2, 1]


def test_no_more_than_asked_for(rig: SinkRig) -> None:
    """``limit`` is a bound, and the others are there for the next call."""
    put(rig, *(an_entry(rig, number) for number in range(1, 6)))
    first = rig.sink.take(rig.type_name, 2, PATIENCE_S)
    assert 1 <= len(first) <= 2
    assert sorted(numbers([*first, *take(rig, 5 - len(first))])) == [1, 2, 3, 4, 5]


def test_types_are_apart(rig: SinkRig) -> None:
    """A take sees its own type only, and so does a key."""
    other = replace(an_entry(rig, 1, key="a"), type_name=f"{rig.type_name}-other")
    put(rig, other, an_entry(rig, 2, key="a"))
    assert (numbers(take(rig)), none_left(rig)) == ([2], True)
    assert [each.entry for each in rig.sink.take(other.type_name, 1, PATIENCE_S)] == [other]


def test_take_waits_for_one(rig: SinkRig) -> None:
    """An entry that comes while somebody waits ends the wait."""
    assert none_left(rig)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.sink.take, rig.type_name, 1, PATIENCE_S)
        put(rig, an_entry(rig))
        assert numbers(waiting.result(PATIENCE_S)) == [1]


def test_take_is_empty_when_time_is_up(rig: SinkRig) -> None:
    """Not before, and not much after."""
    clock = SystemClock()
    assert not rig.sink.take(rig.type_name, 1, 0.0)
    started_s = clock.monotonic_s()
    assert not rig.sink.take(rig.type_name, 1, 0.4)
    assert 0.35 <= clock.monotonic_s() - started_s < PATIENCE_S


def test_a_held_entry_is_not_given_out_again(rig: SinkRig) -> None:
    """However many threads ask, each entry goes to one."""
    put(rig, *(an_entry(rig, number) for number in range(1, 21)))
    found: list[int] = []
    lock = threading.Lock()

    def ask() -> None:
        while taken := rig.sink.take(rig.type_name, 3, 0.5):
            with lock:
                found.extend(numbers(taken))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ask) for _ in range(4)]:
            done.result(PATIENCE_S * 2)
    assert sorted(found) == list(range(1, 21))
    assert none_left(rig)


def test_many_put_at_once(rig: SinkRig) -> None:
    """Futures of many threads are all done, and each entry is there once."""
    with ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(lambda number: rig.sink.put(an_entry(rig, number)), range(1, 101)))
    assert [result(each) for each in futures] == [None] * 100
    assert sorted(numbers(take(rig, 100))) == list(range(1, 101))


def test_an_entry_that_breaks_a_rule_is_refused(rig: SinkRig) -> None:
    """A short uid or a key that is too long is told, and nothing is kept."""
    assert failure_of(lambda: rig.sink.put(replace(an_entry(rig), uid=b"short"))) is not None
    assert failure_of(lambda: rig.sink.put(an_entry(rig, key="k" * 256))) is not None
    assert none_left(rig)


def test_put_can_hold_where_the_sink_can(rig: SinkRig) -> None:
    """Held from the start it is not given out; a sink that cannot says so by its result and gives it out."""
    held = result(rig.sink.put(an_entry(rig), is_held=rig.sink.can_hold))
    assert (held is not None) is rig.sink.can_hold
    if held is None:
        (held,) = take(rig)
    assert none_left(rig)
    result(rig.sink.again(held, rig.sink.clock.now_ms(), is_counted=True))
    (held,) = take(rig)
    assert held.entry.attempts == 1


def test_a_finished_entry_is_forgotten(rig: SinkRig) -> None:
    """Now, and in the next run."""
    put(rig, an_entry(rig))
    (held,) = take(rig)
    assert result(rig.sink.finish(held)) is None
    assert none_left(rig)
    rig.restart()
    assert none_left(rig)
    assert not rig.sink.dead(rig.type_name)


@pytest.mark.parametrize("key", ["", "a"], ids=["plain", "keyed"])
def test_a_returned_entry_comes_again_when_due(rig: SinkRig, key: str) -> None:
    """Not before its new time, with the attempt, and with what went wrong."""
    put(rig, an_entry(rig, key=key, attempts=2))
    (held,) = take(rig)
    due_at_ms = rig.sink.clock.now_ms() + SOON_MS
    result(rig.sink.again(held, due_at_ms, is_counted=True, error="refused: 503"))
    (again,) = take_when_due(rig, due_at_ms, SOON_MS)
    assert rig.sink.clock.now_ms() >= due_at_ms
    assert again.entry == replace(held.entry, due_at_ms=due_at_ms, attempts=3, error="refused: 503")


@pytest.mark.parametrize("key", ["", "a"], ids=["plain", "keyed"])
def test_an_attempt_that_does_not_count_is_not_counted(rig: SinkRig, key: str) -> None:
    """However often it is given back."""
    put(rig, an_entry(rig, key=key))
    attempts = []
    for is_counted in (False, True, False, False, True):
        (held,) = take(rig)
        attempts.append(held.entry.attempts)
        result(rig.sink.again(held, rig.sink.clock.now_ms(), is_counted=is_counted))
    (held,) = take(rig)
    assert [*attempts, held.entry.attempts] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("key", ["", "a"], ids=["plain", "keyed"])
def test_doubt_stays(rig: SinkRig, key: str) -> None:
    """Once an attempt may have succeeded, a later one that surely failed does not take that back."""
    put(rig, an_entry(rig, key=key))
    (held,) = take(rig)
    assert not held.entry.is_uncertain
    result(rig.sink.again(held, rig.sink.clock.now_ms(), is_counted=True, is_uncertain=True))
    (held,) = take(rig)
    assert (held.entry.is_uncertain, held.entry.attempts) == (True, 1)
    result(rig.sink.again(held, rig.sink.clock.now_ms(), is_counted=True, is_uncertain=False))
    (held,) = take(rig)
    assert (held.entry.is_uncertain, held.entry.attempts) == (True, 2)
    result(rig.sink.finish(held))
    assert none_left(rig)


def test_a_key_keeps_its_order(rig: SinkRig) -> None:
    """One at a time, in the order of arrival; other keys go beside it."""
    put(rig, *(an_entry(rig, number, key="ab"[number % 2]) for number in range(1, 9)))
    came: dict[str, list[int]] = {"a": [], "b": []}
    while sum(map(len, came.values())) < 8:
        held = rig.sink.take(rig.type_name, 8, PATIENCE_S)
        assert 1 <= len({each.entry.key for each in held}) == len(held), "two of one key at once, or none"
        for each in held:
            came[each.entry.key] += numbers([each])
            result(rig.sink.finish(each))
    assert came == {"a": [2, 4, 6, 8], "b": [1, 3, 5, 7]}


def test_a_failing_head_keeps_its_key_back(rig: SinkRig) -> None:
    """Those behind it wait with it, however often it fails; others do not."""
    put(rig, an_entry(rig, 1, key="a"), an_entry(rig, 2, key="a"), an_entry(rig, 3, key="b"), an_entry(rig, 4, key="a"))
    held = take(rig, 2)
    assert sorted(numbers(held)) == [1, 3]
    (head,) = (each for each in held if each.entry.key == "a")
    for _ in range(3):
        due_at_ms = rig.sink.clock.now_ms() + SOON_MS
        result(rig.sink.again(head, due_at_ms, is_counted=True))
        (head,) = take_when_due(rig, due_at_ms, SOON_MS)
        assert numbers([head]) == [1]
    assert none_left(rig)
    result(rig.sink.finish(head))
    (second,) = take(rig, most=8)
    assert numbers([second]) == [2]
    result(rig.sink.bury(second, Death.PERMANENT, "never"))
    assert numbers(take(rig, most=8)) == [4], "a dead entry blocks nobody"


def test_a_later_entry_does_not_pass_one_that_is_due_later(rig: SinkRig) -> None:
    """An entry goes behind those of its key that wait already, also if it is due before them."""
    later = an_entry(rig, 1, key="a", in_ms=SOON_MS)
    put(rig, later, an_entry(rig, 2, key="a", in_ms=-5_000))
    (first,) = take_when_due(rig, later.due_at_ms, SOON_MS)
    assert numbers([first]) == [1]
    result(rig.sink.finish(first))
    assert numbers(take(rig, most=8)) == [2]


def test_waiting_entries_of_a_key_are_seen(rig: SinkRig) -> None:
    """Waiting or held; a sink that cannot know says yes."""
    assert rig.sink.has_waiting(rig.type_name, "a") is not rig.knows_backlog
    put(rig, an_entry(rig, key="a"))
    assert rig.sink.has_waiting(rig.type_name, "a")
    (held,) = take(rig)
    assert rig.sink.has_waiting(rig.type_name, "a")
    result(rig.sink.finish(held))
    assert rig.sink.has_waiting(rig.type_name, "a") is not rig.knows_backlog


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_buried_entry_is_dead(rig: SinkRig, *, is_counted: bool) -> None:
    """It never comes again by itself, and tells how it died."""
    put(rig, an_entry(rig, attempts=4, is_uncertain=True, key="a\x00"))
    (held,) = take(rig)
    before_ms = rig.sink.clock.now_ms()
    result(rig.sink.bury(held, Death.TOO_OLD, "gone\n", is_counted=is_counted))
    assert none_left(rig)
    (dead,) = rig.sink.dead(rig.type_name)
    assert dead.entry == replace(held.entry, attempts=4 + is_counted, error="gone\n")
    assert dead.death is Death.TOO_OLD
    assert before_ms <= dead.died_at_ms <= rig.sink.clock.now_ms()


def test_the_dead_set_is_paged_by_uid(rig: SinkRig) -> None:
    """In the order of the uids, whatever the order of their deaths."""
    put(rig, *(an_entry(rig, number) for number in (3, 1, 5, 2, 4)))
    for held in take(rig, 5):
        result(rig.sink.bury(held, Death.EXHAUSTED, "no"))
    found, after = [], b""
    while page := rig.sink.dead(rig.type_name, after=after, limit=2):
        assert len(page) <= 2
        found += [each.entry.uid for each in page]
        after = found[-1]
    assert found == [uid_of(number) for number in range(1, 6)]
    assert not rig.sink.dead(f"{rig.type_name}-other")


def test_a_requeued_entry_starts_with_no_attempts(rig: SinkRig) -> None:
    """Due now, with no attempts behind it; the number says how many were dead."""
    put(rig, an_entry(rig, 1, attempts=7), an_entry(rig, 2))
    for held in take(rig, 2):
        result(rig.sink.bury(held, Death.EXHAUSTED, "no"))
    assert rig.sink.requeue(rig.type_name, [uid_of(1), uid_of(9)]) == 1
    (held,) = take(rig)
    assert (numbers([held]), held.entry.attempts) == ([1], 0)
    assert [each.entry.uid for each in rig.sink.dead(rig.type_name)] == [uid_of(2)]
    assert rig.sink.requeue(rig.type_name, [uid_of(1)]) == 0
    result(rig.sink.bury(held, Death.PERMANENT, "again"))
    dead = {each.entry.uid: each for each in rig.sink.dead(rig.type_name)}
    assert (dead[uid_of(1)].entry.attempts, dead[uid_of(1)].entry.error) == (1, "again")
    assert dead[uid_of(1)].death is Death.PERMANENT


def test_a_requeued_entry_goes_behind_its_key(rig: SinkRig) -> None:
    """Others of its key were there before it."""
    put(rig, an_entry(rig, 1, key="a"), an_entry(rig, 2, key="a"))
    (held,) = take(rig)
    result(rig.sink.bury(held, Death.EXHAUSTED, "no"))
    assert rig.sink.requeue(rig.type_name, [uid_of(1)]) == 1
    (second,) = take(rig, most=8)
    assert numbers([second]) == [2]
    assert none_left(rig)
    result(rig.sink.finish(second))
    assert numbers(take(rig, most=8)) == [1]


def test_figures_follow(rig: SinkRig) -> None:
    """What is held and dead is counted; what waits for its time as well."""
    put(rig, an_entry(rig, 1), an_entry(rig, 2), an_entry(rig, 3, in_ms=LATER_MS))
    one, _ = take(rig, 2)
    result(rig.sink.bury(one, Death.EXHAUSTED, "no"))
    stats = rig.sink.stats(rig.type_name)
    assert (stats.held, stats.dead) == (1, 1)
    assert rig.sink.stats().waiting >= 1
    assert rig.sink.stats().dead >= 1
    assert (stats.oldest_at_ms is not None) is rig.knows_backlog
    nothing = rig.sink.stats(f"{rig.type_name}-none")
    assert (nothing.waiting, nothing.dead, nothing.oldest_at_ms) == (0, 0, None)


def test_the_types_that_were_kept_are_known(rig: SinkRig) -> None:
    """Of what waits none is missing; a type that nobody put is not among them."""
    assert rig.type_name not in rig.sink.types
    put(rig, an_entry(rig))
    assert rig.type_name in rig.sink.types
    assert f"{rig.type_name}-none" not in rig.sink.types


def test_everything_is_there_after_a_restart(rig: SinkRig) -> None:
    """Waiting, held, given back and dead ones, with the attempts that were durable."""
    put(rig, *(an_entry(rig, number, key="a" if number == 4 else "") for number in (1, 2, 3, 4)))
    put(rig, an_entry(rig, 6, key="a"))
    held = {numbers([each])[0]: each for each in take(rig, 4)}
    assert sorted(held) == [1, 2, 3, 4]
    put(rig, an_entry(rig, 5, in_ms=SOON_MS))  # after the take: a slow machine must not see it due before
    result(rig.sink.finish(held[1]))
    result(rig.sink.bury(held[2], Death.OPERATOR, "enough"))
    result(rig.sink.again(held[3], rig.sink.clock.now_ms() + SOON_MS, is_counted=True))
    rig.restart()
    rig.advance(SOON_MS)
    came = {numbers([each])[0]: each.entry.attempts for each in take(rig, 3, most=8)}
    assert came == {3: 1, 4: 0, 5: 0}
    assert none_left(rig)  # 6 is behind 4
    (dead,) = rig.sink.dead(rig.type_name)
    assert (dead.entry.uid, dead.death, dead.entry.error) == (uid_of(2), Death.OPERATOR, "enough")


def test_close_ends_a_wait(rig: SinkRig) -> None:
    """Whoever waits for an entry, or is about to, gets none, and soon."""
    started = threading.Event()

    def wait() -> int:
        started.set()
        return len(rig.sink.take(rig.type_name, 1, 10.0))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert started.wait(PATIENCE_S)
        rig.sink.close()
        assert waiting.result(5.0) == 0


def test_a_closed_sink_raises(rig: SinkRig) -> None:
    """Puts and results are refused, a take is empty, and closing again is nothing."""
    put(rig, an_entry(rig))
    (held,) = take(rig)
    rig.sink.close()
    rig.sink.close()
    assert isinstance(failure_of(lambda: rig.sink.put(an_entry(rig, 2))), SinkClosed)
    assert isinstance(failure_of(lambda: rig.sink.finish(held)), SinkClosed)
    assert not rig.sink.take(rig.type_name, 1, 0.0)
    with pytest.raises(SinkClosed):
        rig.sink.has_waiting(rig.type_name, "a")


def test_entries_put_before_close_are_kept(rig: SinkRig) -> None:
    """Futures that were not waited for are done, and held entries come again."""
    put(rig, an_entry(rig, 1))
    take(rig)
    futures = [rig.sink.put(an_entry(rig, number)) for number in range(2, 31)]
    rig.sink.close()
    assert [result(each) for each in futures] == [None] * 29
    rig.restart()
    assert sorted(numbers(take(rig, 30))) == list(range(1, 31))
