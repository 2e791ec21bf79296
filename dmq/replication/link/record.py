"""Register of the direct link: the standby with acknowledgements that count.

Each write replaces the record that its writer has read. So a primary and a takeover never both believe that their write
is the last one:

- The primary of an epoch writes a member before it answers the first write on an acknowledgement of that member. It
  removes the member once the log has every batch that was answered in this way.
- A standby seals the register before it fences the log. The primary of a sealed epoch changes the register no more.
- A standby that is not the member of the last epoch does not seal the register, and does not take over.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from uuid import uuid4

__all__ = ["LINK", "LinkRecord", "is_nameable", "is_reserved", "sealed"]

LINK = "link"
_EVERY_EPOCH = 2**62


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """Content of the register."""

    epoch: int  # of the primary's log
    member: str = ""  # id of the directory of a standby; empty: none
    address: str = ""  # of the member, for people
    change: str = ""  # random, so that no two contents are equal
    is_sealed: bool = False  # a takeover began

    def encode(self) -> bytes:
        """Return the record as readable JSON, different from all others."""
        return json.dumps(asdict(replace(self, change=uuid4().hex))).encode()

    @classmethod
    def decode(cls, found: tuple[bytes, str] | None) -> LinkRecord | None:
        """Return the record of a read register, None if it is absent.

        A damaged or newer one reserves the log for an unknown member, which only an operator replaces.
        """
        if found is None:
            return None
        try:
            known = json.loads(found[0])
            record = cls(**{field.name: known[field.name] for field in fields(cls)})
            return replace(record, epoch=int(known["epoch"]))
        except (ValueError, KeyError, TypeError):
            return cls(_EVERY_EPOCH, "unknown", is_sealed=True)


def is_reserved(record: LinkRecord | None, member: str, epoch: int) -> bool:
    """Return True if another standby than ``member`` may have batches that the log lacks.

    ``epoch`` is that of the end of the log. Members of earlier epochs have no such batches.
    """
    return record is not None and record.epoch >= epoch and record.member not in ("", member)


def is_nameable(record: LinkRecord | None, epoch: int) -> bool:
    """Return True if the primary of ``epoch`` may change the register."""
    return record is None or record.epoch < epoch or (record.epoch == epoch and not record.is_sealed)


def sealed(record: LinkRecord | None, epoch: int) -> LinkRecord:
    """Return the record that a takeover from the primary of ``epoch`` writes. It keeps the member of that epoch."""
    if record is None or record.epoch < epoch:
        return LinkRecord(epoch, is_sealed=True)
    return replace(record, is_sealed=True)
