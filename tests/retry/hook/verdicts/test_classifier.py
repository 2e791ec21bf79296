"""What errors mean to the hook, without importing the libraries they come from."""

from __future__ import annotations

import socket
from enum import Enum

import pytest

from retry import Permanent, Retry, Throttled, Unknown, Verdict, classify
from retry.hook.verdicts.classifier import describe, judge


class Status(Enum):
    """Names as gRPC has them."""

    INVALID_ARGUMENT = 3
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNAVAILABLE = 14
    DEADLINE_EXCEEDED = 4
    UNKNOWN = 2


class RpcError(Exception):
    """Looks like an error of gRPC."""

    def __init__(self, status: Status, details: str = "") -> None:
        super().__init__(f"{status.name} {details}")
        self._status = status

    def code(self) -> Status:
        return self._status


class ReadTimeout(Exception):
    """A timeout of a library, no TimeoutError."""


class OddCode(Exception):
    """Has a code that is none."""

    def code(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("error", "kind", "is_uncertain"),
    [
        (ConnectionError("x"), Retry, False),
        (ConnectionRefusedError(), Retry, False),
        (socket.gaierror(-2, "no name"), Retry, False),
        (ConnectionResetError(), Retry, True),
        (BrokenPipeError(), Retry, True),
        (TimeoutError(), Retry, True),
        (ReadTimeout(), Retry, True),
        (OSError(5, "io"), Retry, False),
        (RpcError(Status.INVALID_ARGUMENT), Permanent, False),
        (RpcError(Status.PERMISSION_DENIED), Retry, False),
        (RpcError(Status.RESOURCE_EXHAUSTED), Throttled, False),
        (RpcError(Status.UNAVAILABLE), Retry, True),
        (RpcError(Status.UNAVAILABLE, "Socket closed"), Retry, True),
        (RpcError(Status.UNAVAILABLE, "failed to connect to all addresses; last error: ..."), Retry, False),
        (RpcError(Status.UNAVAILABLE, "DNS resolution failed for broker:8081: ..."), Retry, False),
        (RpcError(Status.DEADLINE_EXCEEDED), Retry, True),
        (RpcError(Status.UNKNOWN), Unknown, True),
        (OddCode(), Unknown, True),
        (ValueError("x"), Unknown, True),
        (Permanent("x"), Permanent, False),
        (Throttled(after_s=2), Throttled, False),
    ],
)
def test_defaults(error: BaseException, kind: type[Verdict], is_uncertain: bool) -> None:
    """Each error of the table in the module's head."""
    verdict = classify(error)
    assert type(verdict) is kind
    assert verdict.is_uncertain is is_uncertain


def _after(earlier: BaseException, *, is_cause: bool) -> BaseException:
    """Return an error that proves nothing was sent, raised by the attempt that followed on ``earlier``."""
    try:
        try:
            raise earlier
        except Exception as error:  # noqa: BLE001 - as an application does
            raise ConnectionRefusedError("closed") from (error if is_cause else None)
    except ConnectionRefusedError as last:
        return last


@pytest.mark.parametrize("is_cause", [True, False])
@pytest.mark.parametrize(
    ("earlier", "is_uncertain"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (RpcError(Status.DEADLINE_EXCEEDED), True),
        (Retry(is_uncertain=True), True),
        (ConnectionRefusedError(), False),
        (KeyError("looked up before the send"), False),
    ],
)
def test_an_earlier_attempt_in_doubt_leaves_the_send_in_doubt(
    earlier: BaseException, is_uncertain: bool, *, is_cause: bool
) -> None:
    """A handler that tries again itself raises its last error; a refused connection then proves nothing."""
    verdict = classify(_after(earlier, is_cause=is_cause))
    assert (type(verdict), verdict.is_uncertain) == (Retry, is_uncertain)


def test_errors_that_name_each_other_come_to_an_end() -> None:
    """A chain of contexts may be a ring."""
    one, two = ConnectionRefusedError("1"), ConnectionRefusedError("2")
    one.__context__, two.__context__ = two, one
    assert not classify(one).is_uncertain


def test_a_classifier_may_return_a_class_an_instance_or_nothing() -> None:
    """Nothing leaves the error to the defaults; a verdict that was raised is not put to it."""
    assert type(judge(lambda error: Permanent, ValueError("x"))[0]) is Permanent
    assert judge(lambda error: Throttled(after_s=3), ValueError())[0].args == ("",)
    assert type(judge(lambda error: None, ConnectionError())[0]) is Retry
    assert type(judge(lambda error: Permanent, Retry())[0]) is Retry


def test_a_classifier_that_returns_something_else_makes_the_error_unknown() -> None:
    """And what is wrong with it is told."""
    verdict, broken = judge(lambda error: "retry", ValueError())  # type: ignore[arg-type, return-value]
    assert type(verdict) is Unknown
    assert "'retry'" in str(broken)


def test_any_error_is_one_short_line() -> None:
    """Line breaks and megabytes of text, and a text that cannot be made."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert describe(ValueError("a\n b")) == "ValueError: a b"
    assert len(describe(ValueError("x" * 10**6))) == 300
    assert describe(Mute()) == "Mute: (its text cannot be read)"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_pause_without_end_is_refused() -> None:
    """NaN and negative times are errors of the program."""
    for after_s in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="after_s"):
            Throttled(after_s=after_s)
