"""Histories of single messages across takeovers are linearizable; those of a log that answers early are not."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.clients.load.history import HistoryLoad
from support.effort import EFFORT, SEED, at_length
from support.models.broker.message_history import Answer, Kind, Operation, is_linearizable
from support.rigs.replica.pair import Pair

ROUNDS = EFFORT
_ROUND_S = 4.0
_DRAIN_S_MAX = 60.0


def broken(load: HistoryLoad) -> list[str]:
    """Return the histories that are not linearizable."""
    return [
        f"{message_id}: {sorted(operations, key=lambda each: each.begun_ns)}"
        for message_id, operations in load.histories.items()
        if not is_linearizable(operations)
    ]


@pytest.mark.fault
@pytest.mark.timeout(240 + 90 * ROUNDS)
def test_histories_across_takeovers_are_linearizable(tmp_path: Path) -> None:
    """Sends, recalls, reschedules and acknowledgements of the same messages at once, over kills of the primary."""
    print(f"DMQ_TEST_SEED={SEED} rounds={ROUNDS}")
    with closing(Pair(tmp_path)) as pair, pair.managed(), HistoryLoad(pair.front.address, SEED) as load:
        for _ in range(ROUNDS):
            threading.Event().wait(_ROUND_S)
            pair.lose()
        threading.Event().wait(1.0)
        load.end(_DRAIN_S_MAX)
    found = broken(load)
    print(f"{len(load.histories)} histories, {sum(map(len, load.histories.values()))} operations")
    assert not found, "\n".join(found[:5])
    assert len(load.histories) > 20 * ROUNDS, "too little load to prove anything"


@at_length  # the check itself is tested with planted histories as well
@pytest.mark.fault
@pytest.mark.timeout(240)
def test_answers_before_the_copy_are_convicted(tmp_path: Path) -> None:
    """A log that is an hour behind loses operations at a takeover, and their histories are not linearizable."""
    with ExitStack() as stack:
        env = {"DMQ_REPLICA": "async", "DMQ_REPLICA_EVERY": "1h"}
        pair = stack.enter_context(closing(Pair(tmp_path, env=env)))
        load = stack.enter_context(HistoryLoad(pair.front.address, SEED))
        threading.Event().wait(_ROUND_S)
        pair.primary.kill()
        pair.take_over()
        load.cancel_all()
    assert broken(load)


def _history(*steps: tuple[Kind, Answer, int, int, int]) -> list[Operation]:
    """Return operations; times are milliseconds."""
    return [Operation(kind, answer, begun * 1_000_000, end * 1_000_000, due) for kind, answer, begun, end, due in steps]


_SENT = (Kind.SEND, Answer.DONE, 0, 10, 100)


@pytest.mark.parametrize(
    ("history", "is_right"),
    [
        ([_SENT, (Kind.RECEIVE, Answer.DONE, 100, 120, 0), (Kind.ACK, Answer.DONE, 130, 140, 0)], True),
        ([_SENT, (Kind.RECEIVE, Answer.DONE, 20, 90, 0)], False),
        ([_SENT, (Kind.RESCHEDULE, Answer.DONE, 20, 30, 300), (Kind.RECEIVE, Answer.DONE, 150, 200, 0)], False),
        ([_SENT, (Kind.RESCHEDULE, Answer.NONE, 20, 30, 300), (Kind.RECEIVE, Answer.DONE, 150, 200, 0)], True),
        ([_SENT, (Kind.CANCEL, Answer.DONE, 20, 30, 0), (Kind.RECEIVE, Answer.DONE, 100, 120, 0)], False),
        ([_SENT, (Kind.CANCEL, Answer.NONE, 20, 30, 0), (Kind.RECEIVE, Answer.DONE, 100, 120, 0)], True),
        ([_SENT, (Kind.CANCEL, Answer.UNKNOWN, 20, 30, 0)], False),
        ([_SENT, (Kind.CANCEL, Answer.UNKNOWN, 5, 30, 0)], True),
        ([_SENT, (Kind.CANCEL, Answer.DONE, 20, 40, 0), (Kind.CANCEL, Answer.CANCELLED, 30, 50, 0)], True),
        ([_SENT, (Kind.CANCEL, Answer.TOO_LATE, 20, 40, 0)], False),
        (
            [
                *(_SENT, (Kind.RECEIVE, Answer.DONE, 100, 120, 0), (Kind.ACK, Answer.DONE, 130, 140, 0)),
                (Kind.RECEIVE, Answer.DONE, 150, 160, 0),
            ],
            False,
        ),
        ([_SENT, (Kind.END, Answer.DONE, 500, 500, 0)], False),
    ],
)
def test_the_check_of_histories(history: list[tuple[Kind, Answer, int, int, int]], is_right: bool) -> None:
    """Lost, repeated, early and cancelled messages are convicted; an operation in doubt may have had no effect."""
    assert is_linearizable(_history(*history)) == is_right
