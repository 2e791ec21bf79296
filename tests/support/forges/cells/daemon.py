"""A forged daemon: messages that wait, are handed over, fail and come back, with what becomes of each kept beside."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from support.forges.cells.cell import ForgedCell, Shape
from support.forges.cells.parts import Group, Message, Progress, Queue, Way, groups_of
from support.forges.trail.files import LANE, Snapshot

EPOCH_2021_MS = 1_609_459_200_000
MOVED = 0.05  # of those that wait
REASONS = {"DEAD_FORWARDED": 0.15, "DEAD_SENT_BACK": 0.05, "DEAD_TOO_OLD": 0.05, "DEAD_TOO_LATE": 0.05}


class ForgedDaemon(ForgedCell):
    """A daemon of ``messages`` messages. ``run`` writes its trail; the fields then tell the truth about it."""

    def __init__(self, trail: Path, name: str, shape: Shape, seed: int, messages: int) -> None:
        super().__init__(trail, name, "daemon", shape, seed)
        self.messages: list[Message] = []
        self.queues: dict[tuple[str, str | None, int], Queue] = {}
        self.progress: dict[tuple[str, str, int], Progress] = {}
        self.groups: dict[str, Group] = {}
        self.waiting: dict[int, Message | Way] = {}
        self.retry_due_ms: dict[int, int] = {}
        self.deaths: list[dict[str, Any]] = []
        self.ladder: list[tuple[str, str, int, str]] = []
        self._node = self.random.randbytes(6)
        self._moving = Random(f"{seed}/{name}")  # of its own, so that all else stays as it was
        self._planned = groups_of(shape)
        self.at(shape.start_ms, self._begin)
        for number in range(messages):
            self.at(shape.start_ms + 1 + self.random.randrange(shape.span_ms), self._accept, number)
        for part in range(1, 5):
            self.at(shape.start_ms + part * shape.span_ms // 5, self._tidy, part)

    # -- beginnings ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for number in range(self.shape.topics):
            topic = f"topic-{number}"
            self.emit("TOPIC_CREATED", topic=topic)
            for queue_id in range(self.shape.queues):
                self.queues[topic, None, queue_id] = Queue(topic, None, queue_id)
        for group in self._planned:
            self.at(max(group.since_ms, self.now_ms), self._subscribe, group)

    def _subscribe(self, group: Group) -> None:
        self.emit("GROUP_CREATED", group=group.name)
        self.groups[group.name] = group
        self.queues.setdefault((group.topic, None, 0), Queue(group.topic, None, 0))
        for queue_id in [queue_id for topic, owner, queue_id in self.queues if topic == group.topic and owner is None]:
            from_offset = len(self.queues[group.topic, None, queue_id].items)
            columns = {"topic": group.topic, "group": group.name, "queue_id": queue_id}
            self.emit("SUBSCRIBED", queue_offset=from_offset, **columns)
            self.progress[group.name, group.topic, queue_id] = Progress(from_offset)

    def opened(self) -> None:
        """Plain leases were in memory: what was handed out and not finished is handed out again."""
        for (name, topic, queue_id), progress in self.progress.items():
            progress.cursor = None
            for way in progress.leased.values():
                way.state, way.turn = "unread", way.turn + 1
            progress.leased.clear()
            progress.is_polling = False
            self._wake(name, topic, queue_id)

    def _accept(self, number: int) -> None:
        random, shape = self.random, self.shape
        topic = f"topic-{random.randrange(shape.topics)}"
        if random.random() < shape.text_ids:
            message_id = b"\0" + f"order-{self.name}-{number:07}".encode()
        else:
            seconds = (self.now_ms - EPOCH_2021_MS) // 1000
            message_id = b"\1" + self._node + b"\0\7" + seconds.to_bytes(4) + number.to_bytes(4)
        self._place_new(topic, message_id, is_immediate=random.random() < shape.immediate)

    def _place_new(self, topic: str, message_id: bytes, *, is_immediate: bool) -> Message:
        random = self.random
        message = Message(topic, message_id, self.next_entry(), self.now_ms, None)
        self.messages.append(message)
        if is_immediate:
            self._fire(message, "QUEUED")
            return message
        message.due_ms = due_ms = self.now_ms + random.randint(
            1, max(2, int(self.shape.delay_ms_max * random.random()))
        )
        self.waiting[message.entry] = message
        self.emit("SCHEDULED", topic=topic, due_ms=due_ms, entry=message.entry, message_id=message_id)
        if random.random() < self.shape.recalled:
            self.at(random.randint(self.now_ms, due_ms), self._recall, message)
        self.at(due_ms + int(random.expovariate(0.3)), self._deliver, message, due_ms)
        if self._moving.random() < MOVED:
            self.at(self._moving.randint(self.now_ms, due_ms), self._move, message)
        return message

    def _move(self, message: Message) -> None:
        """Let it wait until another time, sooner or later, some of them once more."""
        if message.state != "waiting":
            return
        random = self._moving
        message.due_ms = due_ms = self.now_ms + random.randint(0, self.shape.delay_ms_max // 2)
        columns = {"topic": message.topic, "entry": message.entry, "message_id": message.message_id}
        self.emit("RESCHEDULED", due_ms=due_ms, **columns)
        self.at(due_ms + random.randint(0, 9), self._deliver, message, due_ms)
        if random.random() < 0.3:
            self.at(random.randint(self.now_ms, due_ms), self._move, message)

    def _place_for_group(self, name: str, topic: str, message_id: bytes, letter: int) -> None:
        """Put a redriven message into a group's lane: nobody else sees it."""
        lane = self.queues.setdefault((topic, name, LANE), Queue(topic, name, LANE))
        self.progress.setdefault((name, topic, LANE), Progress(0))
        message = Message(topic, message_id, self.next_entry(), self.now_ms, None, "for a group")
        self.messages.append(message)
        way = message.ways[name] = Way(name, topic, message, LANE, len(lane.items), message.entry)
        lane.items.append(message)
        self.emit("QUEUED_FOR_GROUP", attempt=1, detail=letter, **self._place_of(way))
        self._wake(name, topic, LANE)

    def _recall(self, message: Message) -> None:
        """Cancel a message; every other one is replaced by a message with its own key, which keeps out another one."""
        if message.state != "waiting":
            return
        message.state = "cancelled"
        del self.waiting[message.entry]
        columns = {"topic": message.topic, "entry": message.entry, "message_id": message.message_id}
        if message.entry % 2:
            self.emit("RECALLED", due_ms=message.due_ms, **columns)
            return
        self.emit("REPLACED", due_ms=message.due_ms, **columns)
        name = f"-{self.name}-{message.entry:07}".encode()
        new = self._place_new(message.topic, b"\0instead" + name, is_immediate=False)
        columns = {"topic": new.topic, "entry": new.entry, "message_id": b"\0absorbed" + name}
        self.emit("ABSORBED", due_ms=new.due_ms, **columns)

    def _deliver(self, message: Message, due_ms: int) -> None:
        if message.state == "waiting" and message.due_ms == due_ms:
            del self.waiting[message.entry]
            self._fire(message, "DELIVERED")

    def _fire(self, message: Message, kind: str) -> None:
        message.state, message.fired_at_ms = "fired", self.now_ms
        queue = self.queues[message.topic, None, self.random.randrange(self.shape.queues)]
        offset = len(queue.items)
        queue.items.append(message)
        columns = {"topic": message.topic, "queue_id": queue.queue_id, "queue_offset": offset}
        self.emit(kind, due_ms=message.due_ms, entry=message.entry, message_id=message.message_id, **columns)
        self._show(message, queue, offset, message.entry)

    def _show(self, message: Message, queue: Queue, offset: int, entry: int) -> None:
        """Let the groups that read a queue see what was put there."""
        for group in self.groups.values():
            if group.topic == queue.topic:
                way = Way(group.name, queue.topic, message, queue.queue_id, offset, entry)
                message.ways[group.name] = way
                self._wake(group.name, queue.topic, queue.queue_id)

    # -- a group's way ------------------------------------------------------------------------------------------------

    def _wake(self, name: str, topic: str, queue_id: int) -> None:
        progress = self.progress[name, topic, queue_id]
        if not progress.is_polling and self.now_ms < self.groups[name].until_ms:
            progress.is_polling = True
            self.at(self.now_ms + self.random.randint(1, 800), self._poll, name, topic, queue_id, self.boot)

    def _poll(self, name: str, topic: str, queue_id: int, boot: int) -> None:
        progress = self.progress[name, topic, queue_id]
        if boot != self.boot:
            return
        progress.is_polling = False
        queue = self.queues[topic, name if queue_id == LANE else None, queue_id]
        start = max(progress.floor, queue.first, progress.cursor or 0)
        for offset in range(start, len(queue.items)):
            # the floor rises in this loop, over what was filtered, and what is below it is in ``done`` no more
            if offset >= progress.floor and offset not in progress.done and offset not in progress.hidden:
                self._hand_out(queue.items[offset].ways[name])
        progress.cursor = len(queue.items)

    def _hand_out(self, way: Way) -> None:
        progress, random = self._progress_of(way), self.random
        way.state, way.turn = "in_flight", way.turn + 1
        progress.leased[way.offset] = way
        progress.hidden.discard(way.offset)
        group = self.groups[way.group]
        if way.queue_id != LANE and way.attempt == 1 and random.random() < group.filtered:
            way.state = "filtered"
            self._exit(way, "FILTERED", attempt=0)
            return
        later_ms = self.now_ms + random.randint(1, 4_000)
        if random.random() >= (self.shape.failing if way.attempt == 1 else 0.5):  # what failed once is prone to
            self.at(later_ms, self._acked, way, way.turn)
        elif random.random() < 0.15:
            self.at(self.now_ms + 15_000, self._comes_back, way, way.turn, "LEASE_EXPIRED")
        elif random.random() < 0.1:
            self.at(later_ms, self._comes_back, way, way.turn, "GIVEN_BACK")
        elif group.is_fifo:
            self.at(later_ms, self._postponed, way, way.turn)
        else:
            self.at(later_ms, self._failed, way, way.turn)
        if random.random() < 0.01:
            self.at(self.now_ms, self._extended, way, way.turn)

    def _again(self, way: Way, turn: int) -> None:
        if way.turn == turn:
            self._hand_out(way)

    def _acked(self, way: Way, turn: int) -> None:
        if way.turn == turn:
            way.state = "acked"
            self.ladder.append((way.topic, way.group, way.attempt, "acked"))
            self._exit(way, "ACKED", attempt=way.attempt)

    def _extended(self, way: Way, turn: int) -> None:
        if way.turn == turn and way.state == "in_flight":
            columns = self._place_of(way)
            self.emit("INVISIBLE_CHANGED", attempt=way.attempt, due_ms=self.now_ms + 30_000, **columns)

    def _comes_back(self, way: Way, turn: int, kind: str) -> None:
        if way.turn == turn:
            way.attempt += 1
            way.turn += 1
            self.emit(kind, attempt=way.attempt, **self._place_of(way))
            self.at(self.now_ms + self.random.randint(1, 900), self._again, way, way.turn)

    def _postponed(self, way: Way, turn: int) -> None:
        if way.turn == turn:
            due_ms = self.now_ms + 1_000 * way.attempt
            self.ladder.append((way.topic, way.group, way.attempt, "failed"))
            self.emit("POSTPONED", attempt=way.attempt, due_ms=due_ms, **self._place_of(way))
            progress = self._progress_of(way)
            progress.leased.pop(way.offset)
            progress.hidden.add(way.offset)
            way.attempt, way.turn = way.attempt + 1, way.turn + 1
            self.at(due_ms, self._again, way, way.turn)

    def _failed(self, way: Way, turn: int) -> None:
        if way.turn != turn:
            return
        topic = way.topic
        self.ladder.append((topic, way.group, way.attempt, "failed"))
        for kind, share in REASONS.items():
            if self.random.random() < share:
                self._bury(way, kind)
                return
        if way.attempt >= self.shape.attempts_max:
            self._bury(way, "DEAD_EXHAUSTED")
            return
        due_ms = self.now_ms + self.random.randint(1_000, 3_000 * 4**way.attempt)
        left = self._leave(way)
        way.state, way.entry = "in_retry", self.next_entry()
        self.waiting[way.entry], self.retry_due_ms[way.entry] = way, due_ms
        columns = {"topic": topic, "group": way.group, "queue_id": left, "entry": way.entry}
        self.emit("NACKED", attempt=way.attempt, due_ms=due_ms, message_id=way.message.message_id, **columns)
        if self.random.random() < 0.03:
            self.at(self.random.randint(self.now_ms, due_ms), self._by_hand, way, way.turn)
        self.at(due_ms + self.random.randrange(5), self._retried, way, way.turn, "RETRIED")

    def _by_hand(self, way: Way, turn: int) -> None:
        if way.turn == turn and self.random.random() < 0.5:
            self._retried(way, turn, "RETRY_MOVED")
        elif way.turn == turn:
            self._bury(way, "DEAD_BY_OPERATOR")

    def _retried(self, way: Way, turn: int, kind: str) -> None:
        if way.turn != turn:
            return
        topic, name = way.topic, way.group
        lane = self.queues.setdefault((topic, name, LANE), Queue(topic, name, LANE))
        self.progress.setdefault((name, topic, LANE), Progress(0))
        del self.waiting[way.entry]
        way.state, way.queue_id, way.offset = "unread", LANE, len(lane.items)
        way.attempt, way.turn = way.attempt + 1, way.turn + 1
        lane.items.append(way.message)
        self.ladder.append((topic, name, way.attempt, "retried"))
        self.emit(kind, attempt=way.attempt, due_ms=self.retry_due_ms.pop(way.entry), **self._place_of(way))
        self._wake(name, topic, LANE)

    def _bury(self, way: Way, kind: str) -> None:
        letters = f"%DLQ%{way.group}"
        queue = self.queues.setdefault((letters, None, 0), Queue(letters, None, 0))
        is_waiting = way.state == "in_retry"
        left = None if is_waiting else self._leave(way)
        if is_waiting:
            del self.waiting[way.entry], self.retry_due_ms[way.entry]
        way.state, way.turn = "dead", way.turn + 1
        offset = len(queue.items)
        queue.items.append(way.message)
        columns = {"topic": way.topic, "group": way.group, "queue_id": left, "attempt": way.attempt}
        self.emit(kind, detail=offset, entry=way.entry, message_id=way.message.message_id, **columns)
        death = {"topic": way.topic, "group": way.group, "reason": kind, "way": way, "offset": offset}
        self.deaths.append(death | {"fate": ""})
        self._show(way.message, queue, offset, way.entry)

    def _exit(self, way: Way, kind: str, *, attempt: int) -> None:
        columns = self._place_of(way)
        self._leave(way)
        self.emit(kind, attempt=attempt, **columns)

    def _leave(self, way: Way) -> int:
        way.turn += 1
        self._progress_of(way).finish(way.offset)
        return way.queue_id

    def _progress_of(self, way: Way) -> Progress:
        return self.progress[way.group, way.topic, way.queue_id]

    def _place_of(self, way: Way) -> dict[str, Any]:
        return {
            "topic": way.topic,
            "group": way.group,
            "queue_id": way.queue_id,
            "queue_offset": way.offset,
            "entry": way.entry,
            "message_id": way.message.message_id,
        }

    # -- operators and retention --------------------------------------------------------------------------------------

    def _tidy(self, part: int) -> None:
        """Redrive some dead letters, purge some, and let retention take the oldest of one queue."""
        for death in [each for each in self.deaths if not each["fate"]]:
            drawn = self.random.random()
            if drawn >= 0.4:
                continue
            death["fate"] = "redriven" if drawn < 0.2 else "purged"
            message = death["way"].message
            columns = {"topic": message.topic, "group": death["group"], "message_id": message.message_id}
            self.emit(death["fate"].upper(), detail=death["offset"], **columns)
            reader = message.ways.get("undertaker")
            is_read = death["fate"] == "purged" and death["group"] == "readers-0"  # other letters it does not read
            if is_read and reader is not None and reader.state in {"unread", "in_flight"}:
                reader.state = "purged"
                self._leave(reader)
            if death["fate"] == "redriven":
                message_id = b"\0" + f"again-{self.name}-{len(self.messages)}".encode()
                if self.random.random() < 0.5:
                    self._place_new(message.topic, message_id, is_immediate=True)
                else:
                    self._place_for_group(death["group"], message.topic, message_id, death["offset"])
        if self.shape.expiring:
            self._expire(self.queues[f"topic-{self.shape.topics - 1}", None, 0], part)

    def _expire(self, queue: Queue, fifths: int) -> None:
        until = queue.first + (len(queue.items) - queue.first) * fifths // 5
        for offset in range(queue.first, until):
            message: Message = queue.items[offset]
            columns = {"topic": queue.topic, "queue_id": queue.queue_id, "queue_offset": offset}
            self.emit("EXPIRED", message_id=message.message_id, due_ms=message.due_ms, **columns)
            queue.first = offset + 1
            for way in message.ways.values():
                if (way.queue_id, way.offset) == (queue.queue_id, offset) and way.state in {"unread", "in_flight"}:
                    way.state = "expired"
                    self._leave(way)
        for (_, topic, queue_id), progress in self.progress.items():
            if (topic, queue_id) == (queue.topic, queue.queue_id):
                progress.skip_to(queue.first)

    def contents(self, snapshot: Snapshot) -> None:
        """Fill in what waits, what lies in the queues, and how far the groups are."""
        for entry, waiting in sorted(self.waiting.items()):
            is_copy = isinstance(waiting, Way)
            message = waiting.message if isinstance(waiting, Way) else waiting
            snapshot.entries.append(
                {
                    "entry": entry,
                    "kind": "RETRY" if is_copy else "DELAYED",
                    "topic": message.topic,
                    "group": waiting.group if isinstance(waiting, Way) else None,
                    "message_id": message.message_id,
                    "due_ms": self.retry_due_ms[entry] if is_copy else message.due_ms,
                    "attempt": waiting.attempt if isinstance(waiting, Way) else 0,
                    "accepted_at_ms": message.accepted_at_ms,
                    "is_stranded": False,
                }
            )
        for queue in self.queues.values():
            place = {"topic": queue.topic, "group": queue.group, "queue_id": queue.queue_id}
            snapshot.queues.append(place | {"first_offset": queue.first, "end_offset": len(queue.items)})
        for (name, topic, queue_id), progress in self.progress.items():
            snapshot.progress.append(
                {
                    "group": name,
                    "topic": topic,
                    "queue_id": queue_id,
                    "floor": progress.floor,
                    "done": sorted(progress.done),
                    "hidden": sorted(progress.hidden),
                    "cursor": progress.cursor,
                }
            )
