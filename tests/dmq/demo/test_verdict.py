"""The demo's verdict: lost, early and duplicate messages, lateness, and the result lines."""

from __future__ import annotations

import pytest

from dmq.demo.verdict import DaemonOutage, DemoVerdict, judge, lines_of

DELAY_MS = 1000
OUTAGE = DaemonOutage(5_000, 6_000)

Report = tuple[object, ...]


def sent(number: int, *, at_ms: int = 100, attempts: int = 1, asked_ms: int = 0) -> Report:
    return ("sent", number, f"id{number}", asked_ms, at_ms, at_ms + 5, attempts)


def received(number: int, at_ms: int, *, due_ms: int = 1_102) -> Report:
    return ("received", number, at_ms, due_ms)


def judged(*reports: Report, outage: DaemonOutage | None = None) -> DemoVerdict:
    planned_ms = {int(str(each[1])): DELAY_MS for each in reports if each[0] == "sent"}
    return judge(planned_ms, reports, outage)


def test_messages_that_came_once_and_in_time_are_fine() -> None:
    verdict = judged(sent(1), sent(2, attempts=3), received(1, 1_102), received(2, 1_110))
    assert (len(verdict.sends), verdict.delivered, verdict.lost, verdict.early) == (2, 2, [], [])
    assert verdict.late_ms == [0, 8]
    assert verdict.faults == []
    assert lines_of(verdict)[0] == "accepted         2   answered OK by the daemon; 1 of them sent repeatedly"


def test_an_accepted_message_that_never_came_is_lost() -> None:
    verdict = judged(sent(1), sent(2), received(1, 1_102))
    assert (verdict.lost, verdict.faults) == ([2], ["messages were lost"])


def test_a_message_without_an_ok_is_not_lost_but_the_run_is_incomplete() -> None:
    verdict = judge({1: DELAY_MS, 2: DELAY_MS}, [sent(1), received(1, 1_102)])
    assert (verdict.lost, verdict.faults) == ([], ["not all sends were accepted"])


@pytest.mark.parametrize(
    ("send", "reception"),
    [
        pytest.param(sent(1), received(1, 1_101), id="before its stamp"),
        pytest.param(sent(1), received(1, 1_099, due_ms=9_000), id="before the earliest moment, with a false stamp"),
        pytest.param(sent(1, asked_ms=2_000), received(1, 1_999, due_ms=2_000), id="before the requested timestamp"),
        pytest.param(sent(1), received(1, 1_099, due_ms=0), id="before the earliest moment, without a stamp"),
    ],
)
def test_a_message_before_its_time_is_early(send: Report, reception: Report) -> None:
    verdict = judged(send, reception)
    assert (verdict.early, verdict.faults) == ([1], ["messages were early"])


def test_a_second_delivery_is_a_duplicate_and_no_failure() -> None:
    verdict = judged(sent(1), received(1, 6_300), received(1, 4_900), outage=OUTAGE)
    assert (verdict.duplicates, verdict.late_ms, verdict.faults) == (1, [3_798], [])


def test_messages_due_during_the_outage_are_counted_separately() -> None:
    verdict = judged(
        *(sent(1), sent(2, at_ms=4_100), sent(3, at_ms=5_200), sent(4, at_ms=7_000)),
        received(1, 1_104),  # long before
        received(2, 6_300, due_ms=5_104),  # due while the daemon was down
        received(3, 6_301, due_ms=6_203),  # due while the consumer was still away
        received(4, 8_009, due_ms=8_005),
        outage=OUTAGE,
    )
    assert (verdict.late_ms, verdict.late_of_outage_ms, verdict.back_ms) == ([2, 4], [98, 1_196], 1_300)


@pytest.mark.parametrize(("due_ms", "late_ms"), [(4_999, 3_895), (1_102, 3_898), (5, 3_900), (0, 3_895)])
def test_a_false_stamp_hides_no_lateness(due_ms: int, late_ms: int) -> None:
    """The message was sent at 100 and answered at 105: it was due from 1,100 to 1,105."""
    assert judged(sent(1), received(1, 5_000, due_ms=due_ms)).late_ms == [late_ms]


def test_the_result_names_every_figure_and_ends_with_the_verdict() -> None:
    sends = [sent(number) for number in range(1, 101)]
    receptions = [received(number, 1_102 + number) for number in range(1, 101)]
    assert lines_of(judged(*sends, *receptions, outage=OUTAGE), "SIGKILL; down for 1.00 s") == [
        "accepted       100   answered OK by the daemon",
        "delivered      100   to the official client, at least once",
        "lost             0",
        "duplicates       0",
        "early            0",
        "lateness       p50         p99         max   at the consumer",
        "             50 ms       99 ms      100 ms   100 messages",
        "kill       SIGKILL; down for 1.00 s",
        "OK: nothing lost, nothing early",
    ]
    lines = lines_of(judged(sent(1), sent(2), received(1, 1_090), received(1, 1_101)))
    assert lines[2:5] == [
        "lost             1   messages 2",
        "duplicates       1",
        "early            1   messages 1",
    ]
    assert lines[-1] == "FAILED: messages were lost, messages were early"
