"""All an operator can order, drawn by chance, about the topics and groups of ``turmoil``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from support.clients.load.turmoil_books import GROUPS, KEYED, PLAIN, TOPICS, Books
from support.clients.wire.client import Received, WireClient, a_message, a_receive

from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.errors import DmqError

SIDE_TOPIC = "side"  # is removed now and then
SIDE_GROUPS = ("side-0", "side-1")  # about whom nothing is promised: they are reset and removed
SCHEDULES = ("tick-0", "tick-1")
_UNRESOLVED = "unresolved-transactions"


class Orders:
    """One operator; ``now_ms`` is what the daemon's clock says."""

    def __init__(
        self,
        admin: AdminClient,
        client: WireClient,
        rng: random.Random,
        books: Books,
        *,
        now_ms: Callable[[], int],
        backups: Path,
    ) -> None:
        self._admin = admin
        self._client = client
        self._rng = rng
        self._books = books
        self._now_ms = now_ms
        self._backups = backups
        self.names = sorted(name for name in vars(Orders) if not name.startswith("_") and name != "draw")

    def draw(self) -> tuple[str, Callable[[], object]]:
        """Return an order, with its name."""
        name = self._rng.choice(self.names)
        order: Callable[[], object] = getattr(self, name)
        return name, order

    # -- messages that wait -------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel some; whoever is told that it is done may rely on it."""
        topic, ids, own_keys = self._some_that_wait()
        try:
            changed = self._admin.cancel(topic, ids, own_keys=own_keys)
        except DmqError:
            self._books.doubt(topic, ids, own_keys)
            raise
        with self._books.lock:
            self._books.cancelled |= {
                each.message_id for each in changed if each.outcome == admin_v1.ChangedMessage.DONE
            }

    def reschedule(self) -> None:
        """Deliver some at another time, which may be over."""
        topic, ids, own_keys = self._some_that_wait()
        deliver_at_ms = self._now_ms() + self._rng.randrange(-500, 3_000)
        self._admin.reschedule(topic, ids, own_keys=own_keys, deliver_at_ms=deliver_at_ms)

    def fire(self) -> None:
        """Deliver some now."""
        topic, ids, own_keys = self._some_that_wait()
        self._admin.fire(topic, ids, own_keys=own_keys)

    def _some_that_wait(self) -> tuple[str, list[str], list[str]]:
        """Return a topic, and either ids of messages that wait there or an own key."""
        topic = self._rng.choice(TOPICS)
        waiting = self._books.waiting(topic, self._now_ms())
        if topic == KEYED and (not waiting or self._rng.random() < 0.7):
            return topic, [], [f"key-{self._rng.randrange(6)}"]
        return topic, self._rng.sample(waiting, min(3, len(waiting))), []

    # -- how fast, how many -------------------------------------------------------------------------------------------

    def pause_topic(self) -> None:
        self._admin.set_topic(self._rng.choice(TOPICS), is_paused=True)

    def resume_topics(self) -> None:
        for topic in TOPICS:
            self._admin.set_topic(topic, is_paused=False)

    def pause_group(self) -> None:
        self._admin.set_group(self._rng.choice(GROUPS), is_paused=True)

    def resume_groups(self) -> None:
        for group in GROUPS:
            self._admin.set_group(group, is_paused=False)

    def slow_topic(self) -> None:
        self._admin.set_topic(self._rng.choice(TOPICS), deliver_rate=self._rng.choice((0, 0, 20, 200)))

    def slow_group(self) -> None:
        self._admin.set_group(self._rng.choice(GROUPS), deliver_rate=self._rng.choice((0, 0, 50, 500)))

    def limit_topic(self) -> None:
        limits = self._rng.choice((0, 0, 30, 300)), self._rng.choice((0, 0, 30, 300))
        self._admin.set_topic(self._rng.choice(TOPICS), max_pending=limits[0], send_rate=limits[1])

    def add_queues(self) -> None:
        self._admin.set_topic(self._rng.choice((PLAIN, KEYED)), queues=self._rng.randrange(8, 12))

    # -- what failed --------------------------------------------------------------------------------------------------

    def retry_now(self) -> None:
        group = self._rng.choice(GROUPS)
        if entries := self._entries(group, 20):
            self._admin.run_retries_now(group, entries)

    def end_retries(self) -> None:
        group = self._rng.choice(GROUPS)
        if entries := self._entries(group, 2):
            self._admin.end_retries(group, entries)

    def _entries(self, group: str, limit: int) -> list[str]:
        return [each.entry for each in self._admin.retries(group, limit=limit).retries]

    def redrive(self) -> None:
        request = admin_v1.StartJobRequest(kind=admin_v1.REDRIVE, group=self._rng.choice((*GROUPS, _UNRESOLVED)))
        if request.group != _UNRESOLVED:
            request.all_groups = self._rng.random() < 0.5
            if not request.all_groups and self._rng.random() < 0.3:
                request.to_topic = KEYED
        self._admin.start_job(request)

    def purge(self) -> None:
        """Purge the dead letters of a group that nobody asks about."""
        group = self._rng.choice(SIDE_GROUPS)
        self._admin.start_job(admin_v1.StartJobRequest(kind=admin_v1.PURGE, group=group, why="a test"))

    def read_dead_letters(self) -> None:
        for group in GROUPS:
            letters = dead_letter_topic(group)
            if found := self._client.receive(letters, "undertaker", batch=3):
                self._client.ack(letters, "undertaker", found)

    # -- beside what is asked about -----------------------------------------------------------------------------------

    def side_group_fails(self) -> None:
        for group in SIDE_GROUPS:
            for each in self._client.receive(PLAIN, group, batch=4):
                if self._rng.random() < 0.5:
                    self._client.change_invisible(PLAIN, group, each, self._rng.choice((10, 1_000)))
                else:
                    bury(self._client, PLAIN, group, each)

    def reset_side_group(self) -> None:
        group, topic = self._rng.choice(SIDE_GROUPS), self._rng.choice(TOPICS)
        begin, end = self._rng.choice(((True, None), (None, True)))
        self._admin.reset_group(admin_v1.ResetGroupRequest(group=group, topic=topic, begin=begin, end=end))

    def remove_side_group(self) -> None:
        self._admin.remove_group(self._rng.choice(SIDE_GROUPS), force=True)

    def order_side_group(self) -> None:
        self._admin.set_group(self._rng.choice(SIDE_GROUPS), is_fifo=self._rng.random() < 0.5)

    def send_beside(self) -> None:
        """Use the topic that is removed now and then, by groups that must get the others."""
        self._client.send(
            *(
                a_message(
                    SIDE_TOPIC,
                    f"{self._rng.getrandbits(136):034X}",
                    deliver_at_ms=self._now_ms() + self._rng.randrange(5_000),
                    properties={"DMQ_KEY": f"side-{self._rng.randrange(3)}"},
                )
                for _ in range(5)
            )
        )
        receive = a_receive(SIDE_TOPIC, self._rng.choice(SIDE_GROUPS))
        self._client.frames("ReceiveMessage", receive)  # also while it is being removed
        self._admin.subscribe(self._rng.choice(GROUPS), SIDE_TOPIC)

    def keep_side_topic_for_less(self) -> None:
        keep = admin_v1.KeepChange(time_ms=self._rng.choice((60_000, 120_000)))
        self._admin.set_topic(SIDE_TOPIC, keep=keep)

    def remove_side_topic(self) -> None:
        self._admin.remove_topic(SIDE_TOPIC, force=True)

    # -- the whole daemon ---------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        self._admin.add_schedule(
            admin_v1.Schedule(
                name=self._rng.choice(SCHEDULES),
                topic=self._rng.choice((PLAIN, KEYED)),
                interval_ms=1_000,
                catch_up=self._rng.choice(("one", "all", "skip")),
                content=admin_v1.Content(body=b"tick"),
            ),
            replace=True,
        )

    def remove_schedule(self) -> None:
        self._admin.remove_schedule(self._rng.choice(SCHEDULES))

    def take_snapshot(self) -> None:
        self._admin.take_snapshot()

    def back_up(self) -> None:
        """All that was answered before is in it."""
        target, page = self._backups / f"{self._rng.getrandbits(40):010x}", self._books.page()
        self._admin.back_up(str(target))
        self._books.backups.append((target, page))

    def verify_ledger(self) -> None:
        self._admin.verify_ledger()

    def accept_clock(self) -> None:
        self._admin.accept_clock("a test")


def bury(client: WireClient, topic: str, group: str, delivery: Received) -> None:
    """Send a delivery to the dead letters."""
    request = wire.ForwardMessageToDeadLetterQueueRequest(
        topic=wire.Resource(name=topic),
        group=wire.Resource(name=group),
        message_id=delivery.message_id,
        receipt_handle=delivery.receipt_handle,
        delivery_attempt=1,
        max_delivery_attempts=delivery.attempt,
    )
    client.ask("ForwardMessageToDeadLetterQueue", request)
