"""The demo's verdict: what is lost, early and duplicated, with which reason, and the exit code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dmq.demo.facts import Acked, Received, Sent
from dmq.demo.result import Life, lines_of
from dmq.demo.verdict import Lateness, Outage, Verdict, judge, spread

DELAY_MS = 1000
OUTAGE = Outage(killed_at_ms=5_000, serving_at_ms=6_000, received_at_ms=6_300)


def sent(number: int, *, at_ms: int = 100, attempts: int = 1, asked_ms: int = 0) -> Sent:
    return Sent(number, f"id{number}", asked_ms, at_ms, at_ms + 5, attempts)


def received(
    number: int, at_ms: int, *, due_ms: int = 1_102, reception: int = 0, message_id: str = "", attempt: int = 1
) -> Received:
    return Received(reception or number, number, message_id or f"id{number}", at_ms, due_ms, attempt)


def judged(
    sends: list[Sent], receptions: list[Received], acks: list[Acked] | None = None, outage: Outage | None = None
) -> Verdict:
    planned_ms = {each.number: DELAY_MS for each in sends}
    return judge(planned_ms, sends, receptions, acks or [], outage)


def test_everything_that_came_once_and_in_time_is_fine() -> None:
    verdict = judged([sent(1), sent(2, attempts=3)], [received(1, 1_102), received(2, 1_110)])
    assert (verdict.sent, verdict.received, verdict.lost, verdict.early, verdict.duplicated) == (2, 2, (), (), 0)
    assert verdict.resent == 1
    assert verdict.lateness == Lateness(count=2, p50_ms=0, p99_ms=8, max_ms=8)
    assert verdict.exit_code == 0


def test_a_message_that_was_answered_ok_and_never_came_is_lost() -> None:
    verdict = judged([sent(1), sent(2)], [received(1, 1_102)])
    assert verdict.lost == (2,)
    assert verdict.exit_code == 1


def test_a_message_that_no_ok_came_for_is_not_lost_but_the_run_is_incomplete() -> None:
    verdict = judge({1: DELAY_MS, 2: DELAY_MS}, [sent(1)], [received(1, 1_102)], [], None)
    assert verdict.lost == ()
    assert verdict.exit_code == 1


@pytest.mark.parametrize(
    ("send", "reception"),
    [
        pytest.param(sent(1), received(1, 1_101), id="before the time on it"),
        pytest.param(
            sent(1), received(1, 1_500, due_ms=1_099), id="with a time on it that is before the one asked for"
        ),
        pytest.param(sent(1), received(1, 1_099, due_ms=9_000), id="before the earliest moment, whatever is on it"),
        pytest.param(sent(1, asked_ms=2_000), received(1, 1_999, due_ms=2_000), id="before the timestamp asked for"),
        pytest.param(sent(1, asked_ms=2_000), received(1, 2_500, due_ms=1_999), id="a timestamp dated back"),
    ],
)
def test_a_message_before_its_time_is_early(send: Sent, reception: Received) -> None:
    verdict = judged([send], [reception])
    assert verdict.early == (1,)
    assert verdict.exit_code == 1


def test_a_repetition_of_what_was_not_acknowledged_before_the_kill_is_explained() -> None:
    again = [received(1, 4_990), received(1, 6_300, reception=2)]
    verdict = judged([sent(1)], again, [Acked(2, 6_310)], OUTAGE)
    assert (verdict.repeated_unacked, verdict.repeated_expired, verdict.unexplained) == (1, 0, ())
    assert verdict.exit_code == 0


def test_a_repetition_after_the_invisible_duration_is_explained() -> None:
    again = [received(1, 1_102), received(1, 11_200, reception=2, attempt=2)]
    verdict = judged([sent(1)], again, [Acked(2, 11_210)])
    assert (verdict.repeated_unacked, verdict.repeated_expired, verdict.unexplained) == (0, 1, ())
    assert verdict.exit_code == 0


@pytest.mark.parametrize(
    ("receptions", "acks"),
    [
        pytest.param(
            [received(1, 4_900), received(1, 6_300, reception=2)], [Acked(1, 4_950)], id="acknowledged before"
        ),
        pytest.param(
            [received(1, 4_900), received(1, 6_300, reception=2, message_id="other")], [], id="stored under two ids"
        ),
    ],
)
def test_a_repetition_without_a_reason_is_a_failure(receptions: list[Received], acks: list[Acked]) -> None:
    verdict = judged([sent(1)], receptions, acks, OUTAGE)
    assert verdict.unexplained == (1,)
    assert verdict.duplicated == 1
    assert verdict.exit_code == 1


def test_a_second_copy_in_the_cluster_has_a_reason_if_the_trail_says_so() -> None:
    """As often as it was sent without an answer, and no more."""
    receptions = [received(1, 1_102 + 10 * number, reception=number) for number in (1, 2, 3)]
    acks = [Acked(number, 1_103 + 10 * number) for number in (1, 2, 3)]
    verdict = judge({1: DELAY_MS}, [sent(1)], receptions, acks, None, {"id1": 1})
    assert (verdict.repeated_in_doubt, verdict.unexplained, verdict.duplicated) == (1, (1,), 2)


def test_what_a_killed_broker_forgot_comes_again() -> None:
    """Of what came before it served again, that is a reason; of what came later it is none."""
    sends = [sent(1), sent(2, at_ms=6_000)]
    receptions = [
        *(received(1, 1_102, reception=1), received(1, 6_500, reception=2)),
        *(received(2, 7_010, due_ms=7_002, reception=3), received(2, 7_100, due_ms=7_002, reception=4)),
    ]
    acks = [Acked(1, 1_110), Acked(3, 7_020)]
    verdict = judged(sends, receptions, acks, replace(OUTAGE, is_of_broker=True))
    assert (verdict.repeated_forgotten, verdict.unexplained) == (1, (2,))
    assert judged(sends, receptions, acks, OUTAGE).unexplained == (1, 2)


def test_what_fell_due_while_nobody_could_deliver_it_is_counted_apart() -> None:
    sends = [sent(1), sent(2, at_ms=4_100), sent(3, at_ms=5_200), sent(4, at_ms=7_000)]
    receptions = [
        received(1, 1_104),  # long before
        received(2, 6_300, due_ms=5_104),  # due while the daemon was down
        received(3, 6_301, due_ms=6_203),  # due while the consumer was still away
        received(4, 8_009, due_ms=8_005),
    ]
    verdict = judged(sends, receptions, [], OUTAGE)
    assert verdict.lateness == Lateness(count=2, p50_ms=2, p99_ms=4, max_ms=4)
    assert verdict.lateness_of_outage == Lateness(count=2, p50_ms=98, p99_ms=1_196, max_ms=1_196)


def test_a_time_on_the_message_that_cannot_be_true_hides_no_lateness() -> None:
    verdict = judged([sent(1)], [received(1, 5_000, due_ms=4_999)])
    assert verdict.lateness.max_ms == 5_000 - 1_100


@pytest.mark.parametrize(
    ("at_ms", "late_ms", "early"), [(1_099, 0, (1,)), (1_100, 0, ()), (1_105, 0, ()), (1_109, 4, ())]
)
def test_without_a_time_on_it_a_message_is_judged_by_when_it_was_sent(
    at_ms: int, late_ms: int, early: tuple[int, ...]
) -> None:
    """It was sent at 100 and answered at 105, to come 1,000 later."""
    verdict = judged([sent(1)], [received(1, at_ms, due_ms=0)])
    assert (verdict.lateness.max_ms, verdict.early) == (late_ms, early)


def test_percentiles_are_ranks_of_what_was_seen() -> None:
    assert spread([]) == Lateness()
    assert spread(list(range(1, 101))) == Lateness(count=100, p50_ms=50, p99_ms=99, max_ms=100)
    assert spread([7]) == Lateness(count=1, p50_ms=7, p99_ms=7, max_ms=7)


def test_the_last_lines_name_every_figure_and_end_with_the_verdict() -> None:
    good = judged([sent(1)], [received(1, 1_102)], [Acked(1, 1_103)])
    lines = lines_of(good, None, [Life()])
    assert [line.split()[0] for line in lines] == [
        "sent", "received", "lost", "duplicated", "early", "lateness", "p50", "OK:",
    ]  # fmt: skip
    with_kill = lines_of(good, OUTAGE, [Life(), Life(down_s=1.0, start_s=0.4, open_ms=12.0)])
    assert with_kill[-2].startswith("kill       SIGKILL; down for 1.00 s; started again: store open in 12 ms")
    bad = replace(good, lost=(4,), early=(5,), unexplained=(6,), planned=2)
    text = "\n".join(lines_of(bad, None, [Life()]))
    assert "lost             1   messages 4" in text
    assert "early            1   messages 5" in text
    assert "1 WITHOUT A REASON: messages 6" in text
    assert text.splitlines()[-1].startswith("FAILED: messages were lost, messages were early, messages came twice")
