"""The clock that is believed: pure but for the manual clock behind it."""

from __future__ import annotations

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreCorrupt
from dmq.store.files.steady_clock import STEP_MS, ClockNews, ClockOptions, ClockStatus, News, SteadyClock
from dmq.store.schema.cell.clock import ClockRow, decode_clock, encode_clock

MINUTE_MS = 60_000
YEAR_MS = 365 * 24 * 60 * MINUTE_MS
JUMP_MS = 10 * MINUTE_MS
STEADY_MS = 10 * MINUTE_MS
OPTIONS = ClockOptions(steady_after_ms=STEADY_MS, jump_max_ms=JUMP_MS)
FOLLOWS = ClockOptions(steady_after_ms=STEADY_MS, jump_max_ms=None)


def step(clock: ManualClock, by_ms: int) -> None:
    clock.step_to(clock.now_ms() + by_ms)


def news_of(believed: SteadyClock) -> list[News]:
    """What happened, which is recorded with that."""
    found, _ = believed.news()
    believed.recorded(len(found))
    return [each.news for each in found]


def go_on(clock: ManualClock, believed: SteadyClock, options: ClockOptions = OPTIONS) -> SteadyClock:
    """The clock of the next run, after a kill: with what was kept."""
    row = believed.row()
    assert row is not None, "recorded before"
    return SteadyClock(clock, options, decode_clock(encode_clock(row)), is_new=False)


def test_time_passes_and_nothing_happens() -> None:
    """Also while the machine is suspended, and while the clock is slewed."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    clock.advance(YEAR_MS)
    assert believed.now_ms() == clock.now_ms()
    assert believed.boot_ms() == clock.boot_ms() == YEAR_MS
    assert believed.monotonic_s() == clock.monotonic_s() == YEAR_MS / 1_000
    assert believed.boot_id() == clock.boot_id()
    clock.suspend(YEAR_MS)
    assert believed.now_ms() == clock.now_ms()
    for _ in range(10_000):
        clock.pass_by(wall_ms=10_004, monotonic_ms=10_000, boot_ms=10_000)
        assert believed.now_ms() == clock.now_ms()
    assert (news_of(believed), believed.is_steady()) == ([], True)


def test_a_step_back_to_where_the_clock_was_read_last() -> None:
    """The time that passed unread is stepped back exactly: it is followed at once, and noticed 50 ms later at most."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    assert believed.now_ms() == clock.now_ms()
    clock.advance(MINUTE_MS)
    step(clock, -MINUTE_MS)
    assert believed.now_ms() == clock.now_ms()
    clock.advance(50)
    assert believed.now_ms() == clock.now_ms()
    assert (news_of(believed), believed.is_steady()) == ([News.STEPPED], False)


@pytest.mark.parametrize("by_ms", [STEP_MS - 100, 100 - STEP_MS])
def test_many_small_steps_within_a_second_are_one(by_ms: int) -> None:
    """However often the clock is read between them: what they add up to is a step, and what waits for it is moved."""
    clock = ManualClock()
    clock.advance(MINUTE_MS)
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    for _ in range(4):
        clock.advance(60)
        step(clock, by_ms)
        assert believed.now_ms() == clock.now_ms()
    found, _ = believed.news()
    assert {each.news for each in found} == {News.STEPPED}
    assert sum(each.moved_ms for each in found) == 4 * by_ms
    assert not believed.is_steady()


@pytest.mark.parametrize("by_ms", [STEP_MS, JUMP_MS, -STEP_MS, -YEAR_MS])
def test_a_step_that_is_followed(by_ms: int) -> None:
    """At once, and it is not steady for a while; a second one begins that anew."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    step(clock, by_ms)
    assert (believed.now_ms(), believed.is_steady()) == (clock.now_ms(), False)
    assert news_of(believed) == [News.STEPPED]
    clock.advance(STEADY_MS - 1)
    assert not believed.is_steady()
    step(clock, -STEP_MS)
    assert not believed.is_steady()
    clock.advance(STEADY_MS - 1)
    assert not believed.is_steady()
    clock.advance(1)
    assert believed.is_steady()
    assert news_of(believed) == [News.STEPPED, News.STEADY]


def test_a_large_step_forward_is_held() -> None:
    """Time goes on from where it was; once the clock was steady for a while it is followed."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    began_ms = clock.now_ms()
    step(clock, JUMP_MS + 1)
    assert believed.now_ms() == began_ms
    clock.advance(STEADY_MS - 1)
    assert believed.now_ms() == began_ms + STEADY_MS - 1
    clock.advance(1)
    assert believed.now_ms() == clock.now_ms() == began_ms + STEADY_MS + JUMP_MS + 1
    assert news_of(believed) == [News.HELD, News.BELIEVED]
    assert believed.is_steady()


def test_a_glitch_is_not_seen_in_the_believed_time() -> None:
    """A year forward, 0.6 s, and back: time went on by 0.6 s."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    began_ms = clock.now_ms()
    step(clock, YEAR_MS)
    assert believed.now_ms() == began_ms
    clock.advance(600)
    assert believed.now_ms() == began_ms + 600
    step(clock, -YEAR_MS)
    assert believed.now_ms() == began_ms + 600
    found, _ = believed.news()
    assert [(each.news, each.step_ms, each.moved_ms) for each in found] == [
        (News.HELD, YEAR_MS, 0), (News.STEPPED, -YEAR_MS, 0),
    ]  # fmt: skip


def test_steps_that_are_each_small_enough_add_up() -> None:
    """What is followed is what is measured from, so that a clock that is corrected in steps is followed."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    for _ in range(3):
        step(clock, JUMP_MS)
        assert believed.now_ms() == clock.now_ms()
    step(clock, JUMP_MS + 1)
    assert believed.now_ms() == clock.now_ms() - JUMP_MS - 1
    step(clock, STEP_MS)
    assert believed.now_ms() == clock.now_ms() - JUMP_MS - 1 - STEP_MS


def test_without_a_bound_every_step_is_followed_and_none_is_steady() -> None:
    clock = ManualClock()
    believed = SteadyClock(clock, FOLLOWS, None, is_new=True)
    step(clock, YEAR_MS)
    assert (believed.now_ms(), believed.is_steady()) == (clock.now_ms(), False)


def test_an_operator_is_believed_at_once() -> None:
    """And once: then there is nothing to accept, until the next step."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    assert not believed.accept("no reason")
    step(clock, YEAR_MS)
    assert believed.accept("it was set by hand")
    assert (believed.now_ms(), believed.is_steady()) == (clock.now_ms(), True)
    assert not believed.accept("again")
    assert believed.news()[0] == [
        ClockNews(News.HELD, YEAR_MS, 0, clock.now_ms(), was_down=False, why=""),
        ClockNews(News.ACCEPTED, 0, YEAR_MS, clock.now_ms(), was_down=False, why="it was set by hand"),
    ]
    step(clock, -STEP_MS)
    assert not believed.is_steady()


@pytest.mark.parametrize("down_ms", [0, 600, STEADY_MS // 2])
def test_a_run_continues_with_the_held_messages(down_ms: int) -> None:
    """Neither the hold nor the wait ends with a kill; time while it was down counts."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    began_ms = clock.now_ms()
    step(clock, YEAR_MS)
    news_of(believed)
    clock.advance(down_ms)
    believed = go_on(clock, believed)
    assert (believed.now_ms(), believed.is_steady()) == (began_ms + down_ms, False)
    clock.advance(STEADY_MS - down_ms)
    assert (believed.now_ms(), believed.is_steady()) == (clock.now_ms(), True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_large_step_that_leads_back_is_followed_at_once(*, is_killed: bool) -> None:
    """Danger: what is stored while a right clock is held would seem that much older once it is believed."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    step(clock, -YEAR_MS)
    clock.advance(5_000)
    assert believed.now_ms() == clock.now_ms()
    if is_killed:
        news_of(believed)
        believed = go_on(clock, believed)
    step(clock, YEAR_MS)
    assert (believed.now_ms(), believed.is_steady()) == (clock.now_ms(), False)
    step(clock, YEAR_MS)
    assert believed.now_ms() == clock.now_ms() - YEAR_MS


def test_a_step_while_the_daemon_was_down_is_noticed() -> None:
    """By the boot clock, as long as the machine was not started anew."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    row = believed.row()
    step(clock, YEAR_MS)
    clock.advance(5_000)
    after = SteadyClock(clock, OPTIONS, row, is_new=False)
    assert (after.now_ms(), after.is_steady()) == (clock.now_ms() - YEAR_MS, False)
    found, _ = after.news()
    assert [(each.news, each.step_ms, each.was_down) for each in found] == [(News.HELD, YEAR_MS, True)]


def test_after_a_start_of_the_machine_only_a_step_back_is_noticed() -> None:
    """And whatever the clock says then has to prove itself for a while."""
    clock = ManualClock()
    row = SteadyClock(clock, OPTIONS, None, is_new=True).row()
    clock.reboot(YEAR_MS)
    after = SteadyClock(clock, OPTIONS, row, is_new=False)
    assert (after.now_ms(), after.is_steady(), news_of(after)) == (clock.now_ms(), False, [])
    step(clock, -2 * YEAR_MS)
    clock.reboot(0)
    after = SteadyClock(clock, OPTIONS, row, is_new=False)
    assert (after.now_ms(), after.is_steady(), news_of(after)) == (clock.now_ms(), False, [News.STEPPED])


def test_an_old_store_without_a_row_has_to_see_the_clock_for_a_while() -> None:
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=False)
    assert not believed.is_steady()
    clock.advance(STEADY_MS)
    assert believed.is_steady()
    assert believed.news()[0] == [ClockNews(News.STEADY, 0, 0, clock.now_ms(), was_down=False, why="")]


def test_an_operator_sees_the_state_of_the_clock() -> None:
    """What it says and what is believed, the last step, how many there were, and how long until it counts as steady."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    began_ms = clock.now_ms()
    assert believed.status() == ClockStatus(began_ms, began_ms, True, False, 0, 0, 0, 0)
    clock.advance(MINUTE_MS)
    step(clock, -YEAR_MS)
    believed.now_ms()
    step(clock, 2 * YEAR_MS)
    stepped_ms = clock.now_ms()
    held = ClockStatus(stepped_ms, stepped_ms - 2 * YEAR_MS, False, True, STEADY_MS, 2, 2 * YEAR_MS, stepped_ms)
    assert believed.status() == held
    clock.advance(MINUTE_MS)
    now_ms = clock.now_ms()
    assert believed.status() == held._replace(
        wall_ms=now_ms, believed_ms=now_ms - 2 * YEAR_MS, steady_in_ms=STEADY_MS - MINUTE_MS
    )
    assert believed.accept()
    assert believed.status() == held._replace(
        wall_ms=now_ms, believed_ms=now_ms, is_steady=True, is_held=False, steady_in_ms=0
    )


def test_an_unrecorded_file_is_found_again_by_the_next_run() -> None:
    """There is no row to keep before."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    step(clock, -YEAR_MS)
    assert believed.row() is None
    assert news_of(believed) == [News.STEPPED]
    assert believed.row() is not None


def test_news_are_bounded() -> None:
    """Nobody records them: the latest are kept."""
    clock = ManualClock()
    believed = SteadyClock(clock, OPTIONS, None, is_new=True)
    for _ in range(2_000):
        step(clock, STEP_MS)
        believed.now_ms()
    found, _ = believed.news()
    assert (len(found), found[-1].wall_ms) == (256, clock.now_ms())


def test_words_of_the_trail_do_not_drift() -> None:
    """An event of the cell has them as its text."""
    assert [each.value for each in News] == [
        "clock_stepped", "clock_held", "clock_believed", "clock_steady", "clock_accepted",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [b"", b"\0" * 32, b"\0" * 33 + b"\xff", b"\0" * 32 + b"\4" + b"\0" * 7])
def test_a_row_that_cannot_be_read_is_damage(value: bytes) -> None:
    with pytest.raises(StoreCorrupt, match="clocks"):
        decode_clock(value)


def test_a_row_is_read_as_it_was_written() -> None:
    row = ClockRow(2**43, 7, -(2**43), 5, is_steady=True, is_held=False, boot_id="a-b")
    assert decode_clock(encode_clock(row)) == row
    row = row._replace(is_steady=False, trusted_offset_ms=-(2**40))
    assert decode_clock(encode_clock(row)) == row
