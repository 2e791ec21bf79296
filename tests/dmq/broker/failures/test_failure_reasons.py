"""Reasons that wait for their failure: whose they are, how long they stay, and what they may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.broker.failures import failure_reasons
from dmq.broker.failures.failure_reasons import KEPT_S, FailureReasons
from dmq.broker.handles.receipt_handle import ReceiptHandle, ReceiptHandles
from dmq.store.schema.cell.identity import Identity
from retry.failure_reason import FailureReason

REASON = FailureReason("RuntimeError", "no courier", "worker-7", "client-1", "192.0.2.7")
HANDLES = ReceiptHandles(Identity(7, b"s" * 32), 1)
FOREIGN = ReceiptHandles(Identity(8, b"t" * 32), 1)


def _handle(number: int = 1, group_id: int = 5, handles: ReceiptHandles = HANDLES) -> str:
    return handles.encode(ReceiptHandle(group_id, 9, 0, number, number, 1, True, b"\x01" * 17))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reasons(clock: ManualClock) -> FailureReasons:
    names: Any = SimpleNamespace(groups={"billing": SimpleNamespace(group_id=5), "other": SimpleNamespace(group_id=6)})
    return FailureReasons(names, HANDLES, clock, is_on=True)


def test_a_reason_is_taken_once(reasons: FailureReasons) -> None:
    """By the handle that it was reported for; the failure's own call adds to it and takes nothing away."""
    assert reasons.note("billing", _handle(), REASON)
    assert reasons.note("billing", _handle(), FailureReason(client_id="client-1", address="192.0.2.8"))
    assert reasons.take(_handle()) == REASON._replace(address="192.0.2.8")
    assert reasons.take(_handle()) is None


def test_unknown_deliveries_are_ignored(reasons: FailureReasons) -> None:
    """A handle of another group, of another store, or of no store keeps nothing, and is no error."""
    for group, handle in (
        ("other", _handle()),
        ("nobody", _handle()),
        ("billing", _handle(handles=FOREIGN)),
        ("billing", "xyz"),
        ("billing", ""),
    ):
        assert reasons.note(group, handle, REASON)
        assert reasons.take(handle) is None


def test_nothing_is_kept_if_it_is_off(reasons: FailureReasons) -> None:
    """``failure_reasons = off`` keeps neither the error nor the client."""
    reasons.is_on = False
    assert not reasons.note("billing", _handle(), REASON)
    reasons.keep("billing", _handle(), REASON)
    assert reasons.take(_handle()) is None


def test_a_report_without_its_failure_is_dropped(reasons: FailureReasons, clock: ManualClock) -> None:
    """After ``KEPT_S``, when the next one comes, and its bytes are free again."""
    reasons.note("billing", _handle(1), REASON)
    clock.advance(int(KEPT_S + 1) * 1000)
    reasons.note("billing", _handle(2), REASON)
    assert reasons.take(_handle(1)) is None
    assert reasons.take(_handle(2)) == REASON
    assert not reasons._bytes
    assert not reasons._bytes_in_all


def test_a_group_and_all_together_have_a_bound(reasons: FailureReasons, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group at its bound loses further reports, and others keep theirs; the bound of all holds for every group."""
    monkeypatch.setattr(failure_reasons, "GROUP_BYTES_MAX", 2_500)
    monkeypatch.setattr(failure_reasons, "BYTES_MAX", 4_000)
    for number in range(1, 4):
        reasons.note("billing", _handle(number), REASON)
    reasons.note("other", _handle(9, group_id=6), REASON)
    reasons.note("other", _handle(10, group_id=6), REASON)
    assert [reasons.take(_handle(number)) is not None for number in range(1, 4)] == [True, True, False]
    assert reasons.take(_handle(9, group_id=6)) == REASON
    assert reasons.take(_handle(10, group_id=6)) is None
    assert reasons.dropped_total == 2


def test_text_of_a_client_is_cut_and_escaped(reasons: FailureReasons) -> None:
    """Control characters cannot move a terminal's cursor, and no text is longer than its bound, in bytes."""
    text = "a\x1b[2J\n\x9b\u202e" + "\u20ac" * 10**6
    reasons.note("billing", _handle(), FailureReason("E" * 10**6, text, "h\x00", "c", "a"))
    kept = reasons.take(_handle())
    assert kept is not None
    assert kept.error_type == "E" * 128
    assert kept.error_text.startswith("a\\x1b[2J\\n\\x9b\\u202e\u20ac\u20ac")
    assert len(kept.error_text.encode()) <= 1024
    assert kept.host == "h\\x00"
    assert all(text.isprintable() for text in kept)
