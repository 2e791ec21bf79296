"""The marks one call at a time: where keys may go, what may be read, who is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dmq.store.schema.keys import timeline_mark as at
from dmq.store.writer.marks import BACKLOG_LAG_MS, Claim, Cursor, Marks

NOW = 1_000_000
PATIENCE_S = 10.0


@pytest.fixture
def marks() -> Marks:
    """The reader has read everything up to and including ``NOW``."""
    made = Marks(at(NOW, 0))
    made.claim(Cursor.LIVE, NOW)
    return made


# -- rule 1: never below the cursor ------------------------------------------------------------------------------------


def test_a_later_time_is_its_own_key(marks: Marks) -> None:
    """What is due after the cursor keeps its time."""
    assert marks.reserve(NOW + 1, NOW, 7) == (0, None)
    assert marks.reserve(NOW + 500, NOW, 8) == (0, None)


def test_a_message_already_due_gets_the_time_of_the_cursor(marks: Marks) -> None:
    """One millisecond behind the claim: the reader comes by there next."""
    assert marks.reserve(NOW - 500, NOW, 7) == (NOW + 1, None)
    assert marks.reserve(NOW, NOW, 8) == (NOW + 1, None)


def test_a_clock_that_stepped_back_lowers_the_marks(marks: Marks) -> None:
    """The cursor lies in the future: the true time is used, and the durable mark must follow."""
    assert marks.reserve(NOW - 200, NOW - 300, 7) == (0, at(NOW - 200, 7))
    marks.release()
    assert marks.low() == at(NOW - 200, 7)
    assert marks.claim(Cursor.LIVE, NOW - 200) == Claim(Cursor.LIVE, at(NOW - 200, 7), at(NOW - 199, 0))


def test_lowering_into_the_backlog_lowers_both_cursors() -> None:
    """The later keys of that batch may lie between the end of the backlog and the live cursor."""
    marks = Marks(at(NOW - 10_000, 0))
    assert marks.split_backlog(NOW)
    marks.claim(Cursor.BACKLOG, NOW)
    marks.claim(Cursor.LIVE, NOW + 5_000)
    marks.reserve(NOW - 3_000, NOW - 4_000, 7)
    marks.release()
    assert marks.claim(Cursor.BACKLOG, NOW + 9_000) == Claim(Cursor.BACKLOG, at(NOW - 3_000, 7), at(NOW, 0))
    assert marks.claim(Cursor.LIVE, NOW + 9_000).start == at(NOW, 0)


def test_lowering_behind_the_backlog_leaves_it_alone() -> None:
    """Only the live cursor moves."""
    marks = Marks(at(NOW - 10_000, 0))
    marks.split_backlog(NOW)
    marks.claim(Cursor.LIVE, NOW + 5_000)
    assert marks.reserve(NOW + 2_000, NOW + 1_000, 7) == (0, at(NOW + 2_000, 7))
    marks.release()
    assert marks.claim(Cursor.BACKLOG, NOW + 1_000).start == at(NOW - 10_000, 0)
    assert marks.claim(Cursor.LIVE, NOW + 9_000).start == at(NOW + 2_000, 7)


# -- rule 2: never into a batch in flight ------------------------------------------------------------------------------


def test_a_claim_stops_below_the_batch_in_flight(marks: Marks) -> None:
    """Neither a row that is not yet visible is passed, nor one that is not yet synced handed out."""
    marks.reserve(NOW + 100, NOW, 7)
    assert marks.claim(Cursor.LIVE, NOW + 500).stop == at(NOW + 100, 7)
    assert marks.claim(Cursor.LIVE, NOW + 500) == Claim(Cursor.LIVE, at(NOW + 100, 7), at(NOW + 100, 7)), (
        "nothing to read"
    )
    marks.release()
    assert marks.claim(Cursor.LIVE, NOW + 500) == Claim(Cursor.LIVE, at(NOW + 100, 7), at(NOW + 501, 0))


def test_a_claim_reads_up_to_now_and_not_further(marks: Marks) -> None:
    """All sequences of this millisecond, none of the next."""
    assert marks.claim(Cursor.LIVE, NOW + 7) == Claim(Cursor.LIVE, at(NOW + 1, 0), at(NOW + 8, 0))
    claim = marks.claim(Cursor.LIVE, NOW + 3)
    assert claim.stop <= claim.start, "the clock stepped back"
    assert marks.low() == at(NOW + 8, 0)


def test_rows_of_a_batch_in_flight_are_not_to_be_used(marks: Marks) -> None:
    """After a lowering an older claim may cover them; nothing is held back otherwise."""
    assert marks.unsynced() > at(2**63, 0)
    marks.claim(Cursor.LIVE, NOW + 50)
    marks.reserve(NOW + 20, NOW, 7)
    assert marks.unsynced() == at(NOW + 20, 7)
    marks.release()
    assert marks.unsynced() > at(2**63, 0)


# -- the reader --------------------------------------------------------------------------------------------------------


def test_retreat_returns_unread_bytes(marks: Marks) -> None:
    """And never moves a cursor forward."""
    marks.claim(Cursor.LIVE, NOW + 100)
    marks.retreat(Cursor.LIVE, at(NOW + 40, 3))
    assert marks.low() == at(NOW + 40, 3)
    marks.retreat(Cursor.LIVE, at(NOW + 90, 0))
    assert marks.low() == at(NOW + 40, 3)


def test_a_lagging_cursor_becomes_the_backlog() -> None:
    """Beyond the lag only; both cursors are read side by side, and ``low`` is the slower one."""
    marks = Marks(at(NOW - BACKLOG_LAG_MS, 0))
    assert not marks.split_backlog(NOW)
    assert marks.split_backlog(NOW + 1)
    assert marks.claim(Cursor.LIVE, NOW + 2) == Claim(Cursor.LIVE, at(NOW + 1, 0), at(NOW + 3, 0))
    assert marks.low() == at(NOW - BACKLOG_LAG_MS, 0)
    assert marks.claim(Cursor.BACKLOG, NOW + 2) == Claim(Cursor.BACKLOG, at(NOW - BACKLOG_LAG_MS, 0), at(NOW + 1, 0))
    marks.retreat(Cursor.BACKLOG, at(NOW - 5, 0))
    assert marks.low() == at(NOW - 5, 0)
    assert marks.split_backlog(NOW + 2), "not yet drained"
    assert marks.has_backlog()
    marks.claim(Cursor.BACKLOG, NOW + 2)
    assert not marks.has_backlog()
    assert not marks.split_backlog(NOW + 2)
    assert marks.low() == at(NOW + 3, 0)


def test_skipped_messages_belong_to_the_backlog_and_are_read_next_to_it() -> None:
    """From where the live cursor was, once; never behind the backlog's cursor, and only what is readable and due."""
    marks = Marks(at(NOW - 30, 7))
    marks.skip(NOW, 10)
    assert marks.claim(Cursor.LIVE, NOW - 21).start == at(NOW - 20, 0), "no further than was said"
    marks.skip(NOW, 1_000)
    assert marks.claim(Cursor.LIVE, NOW + 1) == Claim(Cursor.LIVE, at(NOW, 0), at(NOW + 2, 0))
    assert marks.low() == at(NOW - 30, 7)
    assert marks.claim(Cursor.SKIPPED, NOW + 1) == Claim(Cursor.SKIPPED, at(NOW - 30, 7), at(NOW, 0))
    marks.retreat(Cursor.SKIPPED, at(NOW - 20, 0))
    marks.claim(Cursor.BACKLOG, NOW + 1)
    marks.retreat(Cursor.BACKLOG, at(NOW - 10, 0))
    marks.skip(NOW + 100, 1_000)
    assert marks.claim(Cursor.SKIPPED, NOW - 5) == Claim(Cursor.SKIPPED, at(NOW - 10, 0), at(NOW - 4, 0))
    assert marks.claim(Cursor.SKIPPED, NOW + 200) == Claim(Cursor.SKIPPED, at(NOW - 4, 0), at(NOW + 100, 0))
    claim = marks.claim(Cursor.SKIPPED, NOW + 200)
    assert claim.stop <= claim.start
    marks.skip(NOW + 99, 1_000)
    assert marks.claim(Cursor.LIVE, NOW + 200).start == at(NOW + 100, 0), "never moved back"
    marks.claim(Cursor.BACKLOG, NOW + 200)
    assert not marks.split_backlog(NOW + 200)


def test_nothing_of_the_backlog_is_early_after_a_step_back() -> None:
    """It ends at a time that has not come again: what is due is read, and not the first row of the next millisecond."""
    marks = Marks(at(NOW - 10_000, 0))
    marks.split_backlog(NOW)
    assert marks.claim(Cursor.BACKLOG, NOW - 500) == Claim(Cursor.BACKLOG, at(NOW - 10_000, 0), at(NOW - 499, 0))


def test_there_is_nothing_to_claim_without_a_backlog(marks: Marks) -> None:
    """An empty claim, and no cursor moves."""
    low = marks.low()
    claim = marks.claim(Cursor.BACKLOG, NOW + 9)
    assert claim.stop <= claim.start
    assert marks.low() == low


# -- waking ------------------------------------------------------------------------------------------------------------


def waits(marks: Marks, until_ms: int, meanwhile: Callable[[], object]) -> bool:
    """Let a reader wait while ``meanwhile`` happens; say whether it was woken."""
    woken = threading.Event()

    def wait() -> None:
        marks.wait(until_ms, 2 * PATIENCE_S)  # longer than anybody waits for the thread to end
        woken.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    meanwhile()
    is_woken = woken.wait(0.2)
    marks.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "close wakes everybody"
    return is_woken


def release(marks: Marks, due_ms: int, sequence: int = 7) -> Callable[[], None]:
    def act() -> None:
        marks.reserve(due_ms, NOW, sequence)
        marks.release()

    return act


def test_an_earlier_row_wakes_the_reader(marks: Marks) -> None:
    """It sleeps until the next delivery time; what comes before that must not wait for it."""
    assert waits(marks, NOW + 1_000, release(marks, NOW + 999))


def test_a_later_row_does_not_wake_the_reader(marks: Marks) -> None:
    """Sends for next week cost the reader nothing, whether they come while it waits or before."""
    assert not waits(marks, NOW + 1_000, release(marks, NOW + 1_000, sequence=0))


def test_a_later_row_that_came_before_the_wait_does_not_end_it(marks: Marks) -> None:
    """Not even the first one of the millisecond that the reader sleeps until."""
    release(marks, NOW + 1_000, sequence=0)()
    assert not waits(marks, NOW + 1_000, lambda: None)


def test_a_row_that_came_before_the_wait_is_not_missed(marks: Marks) -> None:
    """Released after the claim and before the wait: the wait returns at once."""
    marks.claim(Cursor.LIVE, NOW)
    release(marks, NOW + 5)()
    assert waits(marks, NOW + 1_000, lambda: None)


def test_a_turn_has_seen_earlier_releases(marks: Marks) -> None:
    """Then the wait waits."""
    release(marks, NOW + 5)()
    marks.begin_turn()
    assert not waits(marks, NOW + 1_000, lambda: None)


def test_a_wake_up_during_a_turn_is_not_lost(marks: Marks) -> None:
    """Whatever is claimed after it."""
    marks.begin_turn()
    marks.wake()
    marks.claim(Cursor.LIVE, NOW)
    assert waits(marks, NOW + 1_000, lambda: None)


def test_nothing_in_flight_releases_nothing(marks: Marks) -> None:
    """Batches of acks alone do not wake the reader."""
    marks.claim(Cursor.LIVE, NOW)
    assert not waits(marks, NOW + 1_000, marks.release)


def test_wake_wakes(marks: Marks) -> None:
    """For a reader that is to end."""
    assert waits(marks, NOW + 1_000, marks.wake)
