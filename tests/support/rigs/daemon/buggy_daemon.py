"""A daemon with a bug: ``python buggy_daemon.py ONE_IN LIST python -m dmq serve ...`` loses one hand-over in ONE_IN.

By turns the entry stays on the timeline, below the mark up to which all is finished, so that nobody ever looks at it
again, or it is deleted and put nowhere; never with an event. The ids of what is lost are appended to the file LIST.
The rest of the command line is the daemon's, so this stands in front of it as ``strace`` would.
"""

from __future__ import annotations

import sys
from pathlib import Path

from broker_adapter.contracts.message import unpack_id
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.assemble import Assembler
from dmq.store.writer.operations import NO_RECEIPT, HandOver
from dmq.trail.events import decode_event


def plant(one_in: int, listed: Path) -> None:
    """Break the hand-over of this process."""
    intact = Assembler._HANDLERS[HandOver]
    handed_over = lost = 0

    def broken(self: Assembler, op: HandOver) -> Receipt:
        nonlocal handed_over, lost
        handed_over += 1
        if handed_over % one_in:
            return intact(self, op)
        lost += 1
        if lost % 2 == 0:
            self._batch.deletes.append((Family.TIMELINE, op.key))
        with listed.open("a", encoding="utf-8") as file:
            file.write(unpack_id(decode_event(op.event).message_id) + "\n")
        return NO_RECEIPT

    Assembler._HANDLERS[HandOver] = broken


if __name__ == "__main__":
    plant(int(sys.argv[1]), Path(sys.argv[2]))
    sys.argv = ["dmq", *sys.argv[sys.argv.index("serve") :]]
    from dmq.cli import main

    sys.exit(main())
