"""Register of the direct link: the rules for its writers."""

from __future__ import annotations

import pytest

from dmq.replication.link.record import LinkRecord, is_nameable, is_reserved, sealed

pytestmark = pytest.mark.unit
NAMED = LinkRecord(5, "member", "host:8085")


def test_a_record_survives_its_encoding() -> None:
    """Two writes of a record have different contents, and equal fields except for the random one."""
    first, second = NAMED.encode(), NAMED.encode()
    assert first != second
    found = LinkRecord.decode((first, ""))
    assert found is not None
    assert (found.epoch, found.member, found.address, found.is_sealed) == (5, "member", "host:8085", False)
    assert LinkRecord.decode(None) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"epoch": 1}', b"\xff", b'{"epoch": "x", "member": ""}'])
def test_a_damaged_record_forbids_every_takeover(content: bytes) -> None:
    """Only an operator can replace it."""
    record = LinkRecord.decode((content, ""))
    assert is_reserved(record, "member", 10**9)
    assert is_reserved(record, "", 10**9)
    assert not is_nameable(record, 10**9)


@pytest.mark.parametrize(
    ("record", "epoch", "member", "reserved"),
    [
        (None, 5, "", False),
        (NAMED, 5, "member", False),
        (NAMED, 5, "other", True),
        (NAMED, 5, "", True),
        (NAMED, 4, "other", True),  # the log has a later epoch than this standby knows
        (NAMED, 6, "other", False),
        (LinkRecord(5), 5, "other", False),
        (sealed(NAMED, 5), 5, "other", True),
        (sealed(NAMED, 5), 5, "member", False),
        (sealed(NAMED, 6), 6, "other", False),
        (sealed(None, 5), 5, "other", False),
    ],
)
def test_a_takeover_is_reserved_for_the_member(
    record: LinkRecord | None, epoch: int, member: str, reserved: bool
) -> None:
    """No other standby takes over from the epoch in which the member's acknowledgements counted, nor after a seal."""
    assert is_reserved(record, member, epoch) is reserved


@pytest.mark.parametrize(
    ("record", "epoch", "nameable"),
    [
        (None, 5, True),
        (NAMED, 5, True),
        (NAMED, 6, True),
        (NAMED, 4, False),
        (sealed(NAMED, 5), 5, False),
        (sealed(None, 5), 5, False),
        (sealed(NAMED, 5), 6, True),
    ],
)
def test_a_primary_changes_the_register_of_its_epoch_until_a_takeover(
    record: LinkRecord | None, epoch: int, nameable: bool
) -> None:
    """A seal ends the right of its epoch, and a later epoch has the right of its own."""
    assert is_nameable(record, epoch) is nameable
