"""Linearizability of the operations on one message: send, recall, reschedule, receive and acknowledge.

Each operation takes effect at one moment between its begin and its end. One without an answer takes effect at any time
after its begin, or never. ``is_linearizable`` searches an order of these moments in which every answer is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kind of an operation."""

    SEND = "send"
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    RECEIVE = "receive"
    ACK = "ack"
    END = "end"  # observed by the test: the message is acknowledged or cancelled


class Answer(Enum):
    """Answer of an operation."""

    DONE = "done"
    TOO_LATE = "too late"
    CANCELLED = "cancelled before"
    UNKNOWN = "unknown message"
    NONE = "no answer"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. ``due_ms`` is the delivery time that a send or a reschedule asks for."""

    kind: Kind
    answer: Answer
    begun_ns: int
    ended_ns: int
    due_ms: int = 0


class Phase(Enum):
    """Phase of a message."""

    ABSENT = "absent"
    PENDING = "pending"
    DELIVERED = "delivered"
    ACKED = "acked"
    CANCELLED = "cancelled"


class _State(NamedTuple):
    phase: Phase = Phase.ABSENT
    due_ms: int = 0


_NEVER_NS = 2**63


def is_linearizable(operations: Sequence[Operation]) -> bool:
    """Return True if an order exists in which every answer is right."""
    ends_ns = [_NEVER_NS if each.answer is Answer.NONE else each.ended_ns for each in operations]
    everything = (1 << len(operations)) - 1
    todo, seen = [(everything, _State())], set[tuple[int, _State]]()
    while todo:
        left, state = todo.pop()
        if all(ends_ns[number] == _NEVER_NS for number in _numbers(left)):
            return True
        if (left, state) in seen:
            continue
        seen.add((left, state))
        first_end_ns = min(ends_ns[number] for number in _numbers(left))
        for number in _numbers(left):
            if operations[number].begun_ns <= first_end_ns:
                todo += [(left & ~(1 << number), after) for after in _after(state, operations[number])]
    return False


def _numbers(left: int) -> Iterator[int]:
    while left:
        lowest = left & -left
        yield lowest.bit_length() - 1
        left ^= lowest


def _after(state: _State, operation: Operation) -> Iterator[_State]:
    """Yield the states after an operation with its answer; none if the answer is wrong."""
    yield from _answered(state, operation)
    is_due = operation.answer is not Answer.NONE and operation.ended_ns >= state.due_ms * 1_000_000
    if state.phase is Phase.PENDING and is_due:  # the daemon delivers it before
        yield from _answered(state._replace(phase=Phase.DELIVERED), operation)


def _answered(state: _State, operation: Operation) -> Iterator[_State]:
    phase, kind = state.phase, operation.kind
    if operation.answer is Answer.NONE:
        yield state  # no effect
    if operation.answer in {Answer.DONE, Answer.NONE}:
        match kind, phase:
            case Kind.SEND, Phase.ABSENT:
                yield _State(Phase.PENDING, operation.due_ms)
            case Kind.CANCEL, Phase.PENDING:
                yield state._replace(phase=Phase.CANCELLED)
            case Kind.RESCHEDULE, Phase.PENDING:
                yield _State(Phase.PENDING, operation.due_ms)
            case Kind.RECEIVE, Phase.DELIVERED:
                yield state
            case Kind.ACK, Phase.DELIVERED | Phase.ACKED:
                yield state._replace(phase=Phase.ACKED)
            case Kind.END, Phase.ACKED | Phase.CANCELLED:
                yield state
    elif (operation.answer, phase) in {
        (Answer.TOO_LATE, Phase.DELIVERED),
        (Answer.TOO_LATE, Phase.ACKED),
        (Answer.CANCELLED, Phase.CANCELLED),
        (Answer.UNKNOWN, Phase.ABSENT),
    }:
        yield state
