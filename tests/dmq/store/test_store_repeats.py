"""A message that was accepted is accepted once: repeats in a batch, later, after restarts, after delivery."""

from __future__ import annotations

from typing import Literal

import pytest
from support.rigs.store.rows import SCOPE, all_rows, append, events, packed_id, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import EntryState

pytestmark = pytest.mark.contract
WINDOW_MS = 15 * 60_000


# -- idempotency -------------------------------------------------------------------------------------------------------


def test_a_repeat_within_a_batch_gets_the_first_answer(bench: Bench) -> None:
    """Also when one of both is due at once and the other later: the first one counts."""
    receipts = bench.store.commit(
        [append(1), append(1), schedule(1, NOW_MS + 1), schedule(2, NOW_MS + 5), schedule(2, NOW_MS + 9), append(2)]
    )
    assert receipts[1] == receipts[2] == receipts[0]._replace(repeated=True)
    assert receipts[4] == receipts[5] == receipts[3]._replace(repeated=True)
    assert len(all_rows(bench.store, Family.QUEUE)) == len(all_rows(bench.store, Family.TIMELINE)) == 1
    assert [event.event for event in events(bench.store)] == [b"queued", b"scheduled"]
    assert bench.store.pending() == {SCOPE: 1}


def test_a_repeat_in_a_later_batch_gets_the_first_answer(bench: Bench) -> None:
    """Nothing is written for it: no row, no event, no sequence."""
    first = bench.store.commit([append(1), schedule(2, NOW_MS + 60_000)])
    before = [all_rows(bench.store, family) for family in Family]
    assert bench.store.commit([append(1), schedule(2, NOW_MS + 70_000)]) == [
        each._replace(repeated=True) for each in first
    ]
    assert [all_rows(bench.store, family) for family in Family] == before


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_repeat_after_a_restart_gets_the_first_answer(bench: Bench, end: Literal["close", "kill"]) -> None:
    """However the process ended."""
    first = bench.store.commit([append(1), schedule(2, NOW_MS + 60_000)])
    store = bench.restart() if end == "close" else bench.kill()
    assert store.commit([append(1), schedule(2, NOW_MS + 60_000)]) == [each._replace(repeated=True) for each in first]
    assert store.commit([append(3)])[0].sequence == 3, "sequences go on"


def test_a_repeat_of_an_overdue_message_gets_the_first_answer(bench: Bench) -> None:
    """Its key is moved up to the reader's cursor; the answer is the same all the same."""
    bench.clock.advance(5_000)
    bench.deliver()
    (first,) = bench.store.commit([schedule(1, NOW_MS)])
    assert bench.store.commit([schedule(1, NOW_MS)]) == [first._replace(repeated=True)]
    assert bench.store.find(SCOPE, packed_id(1)) == first._replace(repeated=True)


def test_a_repeat_after_delivery_hears_of_it(bench: Bench) -> None:
    """A send repeated after its message was handed over is answered with where it went; no second message."""
    bench.store.commit([schedule(1, NOW_MS + 1_000)])
    bench.clock.advance(1_000)
    (delivered,) = bench.deliver()
    assert bench.store.commit([schedule(1, NOW_MS + 1_000)]) == [delivered._replace(repeated=True)]
    assert bench.kill().commit([append(1)]) == [delivered._replace(repeated=True)]
    assert len(all_rows(bench.store, Family.QUEUE)) == 1


def test_scopes_are_apart(bench: Bench) -> None:
    """One message can wait for two groups at once."""
    bench.store.commit([schedule(1, NOW_MS + 1, scope=1), schedule(1, NOW_MS + 2, scope=2), append(1, scope=3)])
    assert bench.store.pending() == {1: 1, 2: 1}
    assert [found.state if (found := bench.store.find(scope, packed_id(1))) else None for scope in (1, 2, 3, 4)] == [
        EntryState.WAITING, EntryState.WAITING, EntryState.QUEUED, None,
    ]  # fmt: skip


def test_a_finished_message_is_known_for_the_window_and_forgotten_after_two(bench: Bench) -> None:
    """Traffic every minute: known for a window at least, unknown after two; what waits is known as long as it waits."""
    bench.clock.advance(WINDOW_MS - 60_000)  # near the end of a generation
    began_ms = bench.clock.now_ms()
    bench.store.commit([append(1), schedule(2, NOW_MS + 10 * WINDOW_MS)])
    number = 100
    while bench.clock.now_ms() < began_ms + WINDOW_MS:
        assert bench.store.commit([append(1)])[0].repeated
        bench.clock.advance(60_000)
        number += 1
        bench.store.commit([append(number)])
    while bench.clock.now_ms() < began_ms + 2 * WINDOW_MS + 60_000:
        bench.clock.advance(60_000)
        number += 1
        bench.store.commit([append(number)])
    assert bench.store.find(SCOPE, packed_id(1)) is None
    assert bench.store.commit([schedule(2, NOW_MS)])[0].repeated
    assert not bench.store.commit([append(1)])[0].repeated


def test_old_generations_are_dropped_whole(bench: Bench) -> None:
    """One deletion of a range per window, whatever the number of messages; and they are gone from the disk's view."""
    for _ in range(6):
        bench.store.commit([append(number + bench.clock.now_ms()) for number in range(50)])
        bench.clock.advance(WINDOW_MS)
    bench.store.commit([append(1)])
    assert len(all_rows(bench.store, Family.INDEX)) <= 2 * 50
    ranges = [each for batch in bench.gate.batches for each in batch.ranges]
    deletes = [each for batch in bench.gate.batches for each in batch.deletes if each[0] == Family.INDEX]
    assert 4 <= len(ranges) <= 6
    assert {family for family, _, _ in ranges} == {Family.INDEX}
    assert deletes == []


def test_a_clock_stepping_back_forgets_nothing(bench: Bench) -> None:
    """A step back by a day: what was known stays known for a whole window from there."""
    bench.store.commit([append(1)])
    bench.clock.advance(WINDOW_MS // 2)
    bench.clock.step_to(NOW_MS - 86_400_000)
    for _ in range(14):
        assert bench.store.commit([append(1)])[0].repeated
        bench.clock.advance(60_000)
    for number in range(2, 32):
        bench.clock.advance(60_000)
        bench.store.commit([append(number)])
    assert bench.store.find(SCOPE, packed_id(1)) is None, "and windows go on from there"


def test_a_clock_stepping_forward_forgets_nothing_at_once(bench: Bench) -> None:
    """A step forward by a day, or a quiet day: the repeat that comes first after it is still known."""
    bench.store.commit([append(1)])
    bench.clock.step_to(NOW_MS + 86_400_000)
    assert bench.store.commit([append(1)])[0].repeated
