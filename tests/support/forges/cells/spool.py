"""A forged spool: entries that are sent when due, fail, die, are requeued and dropped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.forges.cells.cell import ForgedCell, Shape
from support.forges.trail.files import Snapshot

TYPES = ("invoice", "mail")


@dataclass(slots=True, eq=False)
class Spooled:
    """An entry and its fate."""

    type_name: str
    entry: int
    message_id: bytes
    made_ms: int
    due_ms: int
    is_parked: bool
    attempts: int = 0
    state: str = "waiting"


class ForgedSpool(ForgedCell):
    """A spool of ``messages`` entries."""

    def __init__(self, trail: Path, name: str, shape: Shape, seed: int, messages: int) -> None:
        super().__init__(trail, name, "spool", shape, seed)
        self.kept: list[Spooled] = []
        for _ in range(messages):
            self.at(shape.start_ms + 1 + self.random.randrange(shape.span_ms), self._spool)

    def _spool(self) -> None:
        random = self.random
        due_ms = self.now_ms + random.choice([0, random.randint(1, self.shape.delay_ms_max)])
        message_id = b"\1" + random.randbytes(16)
        type_name = random.choice(TYPES)
        kept = Spooled(type_name, self.next_entry(), message_id, self.now_ms, due_ms, random.random() < 0.05)
        self.kept.append(kept)
        self._tell("SCHEDULED", kept, due_ms=due_ms)
        if random.random() < 0.01:
            self.at(random.randint(self.now_ms, due_ms), self._drop, kept)
        self.at(due_ms + random.randrange(10), self._try, kept)

    def _drop(self, kept: Spooled) -> None:
        if kept.state == "waiting":
            kept.state = "dropped"
            self._tell("DROPPED", kept, attempt=kept.attempts, detail=kept.made_ms)

    def _try(self, kept: Spooled) -> None:
        if kept.state != "waiting":
            return
        kept.is_parked = False
        kept.attempts += 1
        if self.random.random() < (0.8 if kept.attempts == 1 else 0.5):
            kept.state = "sent"
            self._tell("SENT", kept, attempt=kept.attempts, due_ms=kept.due_ms)
        elif kept.attempts >= self.shape.attempts_max:
            kept.state = "dead"
            self._tell("SEND_DEAD", kept, attempt=kept.attempts, detail=kept.made_ms)
            if self.random.random() < 0.4:
                self.at(self.now_ms + self.random.randint(1_000, 600_000), self._requeue, kept)
        else:
            kept.due_ms = self.now_ms + self.random.randint(500, 4_000 * 4**kept.attempts)
            kept.entry = self.next_entry()
            self._tell("SEND_FAILED", kept, attempt=kept.attempts, due_ms=kept.due_ms)
            self.at(kept.due_ms + self.random.randrange(10), self._try, kept)

    def _requeue(self, kept: Spooled) -> None:
        kept.state, kept.due_ms, kept.attempts, kept.entry = "waiting", self.now_ms, 0, self.next_entry()
        self._tell("REQUEUED", kept, due_ms=kept.due_ms)
        self.at(self.now_ms + 5, self._try, kept)

    def _tell(
        self, kind: str, kept: Spooled, *, attempt: int = 0, due_ms: int | None = None, detail: int | None = None
    ) -> None:
        is_waiting = kept.state == "waiting"
        columns = {"topic": kept.type_name, "entry": kept.entry if is_waiting else None, "message_id": kept.message_id}
        self.emit(kind, attempt=attempt, due_ms=due_ms, detail=detail, **columns)

    def contents(self, snapshot: Snapshot) -> None:
        """Fill in what waits, and what is dead."""
        for kept in self.kept:
            if kept.state not in {"waiting", "dead"}:
                continue
            kind = "DEAD" if kept.state == "dead" else "PARKED" if kept.is_parked else "SPOOLED"
            snapshot.entries.append(
                {
                    "entry": kept.entry if kind == "SPOOLED" else None,
                    "kind": kind,
                    "topic": kept.type_name,
                    "group": None,
                    "message_id": kept.message_id,
                    "due_ms": kept.due_ms,
                    "attempt": kept.attempts,
                    "accepted_at_ms": kept.made_ms,
                    "is_stranded": False,
                }
            )
