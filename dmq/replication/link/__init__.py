"""Direct link: a standby acknowledges batches before the object store has them.

The replication log in the object store stays the one log. The link only answers earlier. A register in the object store
names the standby with acknowledgements that count, so that no other one takes over without them.

Imports: ``dmq.replication.objects``, ``dmq.replication.segment``, ``dmq.store``. Interface: the names below.
"""

from __future__ import annotations

from dmq.replication.link.frames import FRAME_BYTES_MAX, LinkBroken, LinkChannel
from dmq.replication.link.received import ReceivedBatch, ReceivedBatches, following
from dmq.replication.link.record import LINK, LinkRecord
from dmq.replication.link.sender import LinkSender, LinkState, LinkStatus, Unstored
from dmq.replication.link.sockets import LinkListener, dial
from dmq.replication.link.standby_link import LinkEndpoint, StandbyLink

__all__ = [
    "FRAME_BYTES_MAX",
    "LINK",
    "LinkBroken",
    "LinkChannel",
    "LinkEndpoint",
    "LinkListener",
    "LinkRecord",
    "LinkSender",
    "LinkState",
    "LinkStatus",
    "ReceivedBatch",
    "ReceivedBatches",
    "StandbyLink",
    "Unstored",
    "dial",
    "following",
]
