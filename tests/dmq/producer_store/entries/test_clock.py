"""The clock of a spool: it follows the host's and never goes back, in one process and from one to the next."""

from __future__ import annotations

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.producer_store.entries.clock import ForwardClock
from dmq.store.files.steady_clock import JUMP_MAX_MS, STEADY_AFTER_MS
from dmq.store.schema.cell.clock import ClockRow

HOUR_MS = 3_600_000
PASSED_MS = 300  # since the machine was started


class Nameless(ManualClock):
    """The clock of a host that does not say which boot it is."""

    def boot_id(self) -> str:
        return ""


def known(clock: ManualClock, **changed: object) -> ClockRow:
    """What another process kept of the clock just now: an hour behind its wall clock, which it did not believe."""
    now_ms, boot_ms = clock.now_ms(), clock.boot_ms()
    row = ClockRow(now_ms + 2 * HOUR_MS, boot_ms, now_ms - boot_ms + HOUR_MS, 0, False, True, clock.boot_id())
    return row._replace(**changed)  # type: ignore[arg-type]


def test_a_step_back_is_not_followed_and_a_small_one_forward_is() -> None:
    """Time passes as before until the host's clock has caught up, from wherever that is."""
    clock = ManualClock()
    forward = ForwardClock(clock)
    began_ms = clock.now_ms()
    clock.step_to(began_ms - HOUR_MS)
    clock.advance(1_000)
    assert forward.now_ms() == began_ms + 1_000
    clock.advance(HOUR_MS)
    assert forward.now_ms() == began_ms + 1_000 + HOUR_MS
    for _ in range(7):
        clock.step_to(clock.now_ms() + JUMP_MAX_MS)
        assert forward.now_ms() == max(clock.now_ms(), began_ms + 1_000 + HOUR_MS)
    assert forward.now_ms() == clock.now_ms()


def test_a_large_step_forward_is_followed_once_the_clock_was_steady() -> None:
    """Not before: entries would be too old at once."""
    clock = ManualClock()
    forward = ForwardClock(clock)
    began_ms = clock.now_ms()
    clock.step_to(began_ms + JUMP_MAX_MS + 1)
    assert forward.now_ms() == began_ms
    clock.advance(STEADY_AFTER_MS - 1)
    assert forward.now_ms() == began_ms + STEADY_AFTER_MS - 1
    clock.advance(1)
    assert forward.now_ms() == clock.now_ms()


def test_the_next_process_of_a_boot_continues_the_steady_clock() -> None:
    """Also if no time passed in between; the same row a second time changes nothing."""
    clock = ManualClock()
    clock.advance(PASSED_MS)
    forward = ForwardClock(clock)
    began_ms = clock.now_ms()
    assert forward.go_on_from(known(clock))
    assert forward.now_ms() == began_ms + HOUR_MS
    assert not forward.go_on_from(known(clock))
    clock.advance(1_000)
    assert forward.now_ms() == began_ms + HOUR_MS + 1_000


@pytest.mark.parametrize(
    ("clock", "changed"),
    [
        (ManualClock(), {"boot_id": "boot-9"}),
        (ManualClock(), {"boot_ms": PASSED_MS + 1}),
        (Nameless(), {}),
    ],
    ids=["another boot", "a boot clock that lies ahead", "a host that does not say"],
)
def test_after_another_boot_the_wall_clock_counts(clock: ManualClock, changed: dict[str, object]) -> None:
    """Its boot clock began anew, so that distances from it mean nothing."""
    clock.advance(PASSED_MS)
    forward = ForwardClock(clock)
    assert forward.go_on_from(known(clock, **changed))
    assert forward.now_ms() == clock.now_ms() + 2 * HOUR_MS


def test_a_process_that_was_behind_changes_nothing() -> None:
    """The clock that is ahead is the one that counts."""
    clock = ManualClock()
    forward = ForwardClock(clock)
    assert not forward.go_on_from(known(clock, believed_offset_ms=clock.now_ms() - 1))
    assert not forward.go_on_from(known(clock, boot_id="boot-9", wall_ms=clock.now_ms() - 1))
    assert forward.now_ms() == clock.now_ms()
