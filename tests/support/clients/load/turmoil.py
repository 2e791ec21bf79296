"""Everything at once on a real daemon: clients of all kinds, operators, kills, restores, salvages, a clock that is set.

Processes stand still, too. Senders send now, later, in order, under own keys and in transactions, and recall some.
Groups acknowledge most, hide, fail and bury the rest; one reads by offset. An operator draws orders out of all there
are, for the same topics and groups. ``unexplained`` lists the messages that ended as nobody asked: each one that was
accepted is acknowledged by each group, or the daemon says where it is, and a client or an operator had asked for that.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import grpc
import psutil
from support.clients.load.turmoil_books import GROUPS, KEYED, ORDERED, READERS, TOPICS, Books, Sent
from support.clients.load.turmoil_orders import Orders, bury
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.faults.wall_shim import WallShim

from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.signature import Signer
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.errors import DmqError

RETRY_DELAYS_MS = (200, 500, 1_500)
ATTEMPTS_MAX = 4
INVISIBLE_S = 10
PATIENCE_S = 60.0
STEPS_MS = (0, 0, 600_000, -600_000, 50_000, -50_000, 3_000, -3_000, 40 * 86_400_000)  # ahead of the host's clock
STANDSTILLS_S = (0.3, 1.0, 3.0)
_AWAY = (grpc.RpcError, DmqError)
_SOON_MS = 5_000  # what waits longer was sent, or moved, while the clock was ahead
_PAUSE_S = 0.03  # between two tries while the daemon is away
_Answer = TypeVar("_Answer", wire.SendMessageResponse, wire.EndTransactionResponse)


class Turmoil:
    """All of them at work on a daemon, until ``calm``. Errors that nobody expects are raised there."""

    def __init__(
        self, daemon: Daemon, seed: int, folder: Path, *, shim: WallShim | None = None, signer: Signer | None = None
    ) -> None:
        self.books = Books()
        self._daemon = daemon
        self._seed = seed
        self._folder = folder
        self._shim = shim
        self._signer = signer
        self._ahead_ms = 0
        self._ends = threading.Event()  # whoever sends, orders and kills
        self._is_careful = threading.Event()  # acknowledge everything
        self._ends_receiving = threading.Event()
        self._failures: list[BaseException] = []
        with self.admin() as admin:
            for topic in TOPICS:
                admin.create_topic(topic)
            for group in GROUPS:
                policy = admin_v1.Policy(
                    table=admin_v1.TableBackoff(steps_ms=RETRY_DELAYS_MS), max_attempts=ATTEMPTS_MAX
                )
                admin.set_group(group, policy=policy)
                for topic in TOPICS:
                    admin.subscribe(group, topic)
        self._causes = [self._start(self._send, number) for number in range(3)]
        self._causes += [self._start(self._operate), self._start(self._disturb)]
        self._receivers = [
            self._start(self._consume, group, topic, is_push)
            for group in GROUPS
            for topic in TOPICS
            for is_push in (False, True)
        ]
        self._receivers += [self._start(self._read, topic) for topic in TOPICS]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all threads, also those of a test that failed."""
        self._ends.set()
        self._ends_receiving.set()
        for each in (*self._causes, *self._receivers):
            each.join(PATIENCE_S)

    def admin(self) -> AdminClient:
        """Return a client for operators."""
        return AdminClient(self._daemon.address, timeout_s=20, signer=self._signer)

    def calm(self) -> None:
        """End what makes trouble, undo what holds messages up, and wait until everything that comes has come."""
        self._is_careful.set()
        self._ends.set()
        self._join(self._causes)
        self._step(0)
        with self.admin() as admin:
            admin.accept_clock("the end of the test")
            for topic in TOPICS:
                admin.set_topic(topic, is_paused=False, deliver_rate=0, max_pending=0, send_rate=0)
            for group in GROUPS:
                admin.set_group(group, is_paused=False, deliver_rate=0)
            for name in [each.name for each in admin.schedules().schedules]:
                admin.remove_schedule(name)
            self._wait_for_the_rest(admin)
        self._ends_receiving.set()
        self._join(self._receivers)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        for each in threads:
            each.join(PATIENCE_S)
            assert not each.is_alive(), f"{each.name} does not end"
        if self._failures:
            raise self._failures[0]

    def unexplained(self) -> list[str]:
        """Return the messages that ended as nobody asked, and how."""
        books, found = self.books, []
        with self.admin() as admin:
            for group, message_id in books.missing():
                sent = books.sent[message_id]
                fate = _fate(admin, group, sent.topic, message_id)
                if not self._may_end_so(group, message_id, sent, fate):
                    found.append(f"{message_id} never came to {group}: {fate} {sent}")
        for group, seen in books.seen.items():
            found += [f"{message_id} came to {group} and was cancelled" for message_id in books.cancelled & seen]
        for group, acked in books.acked.items():
            unread = {each for each in acked - books.ever_seen[READERS] if each in books.sent}
            found += [f"{message_id} came to {group}, and was not to be read by offset" for message_id in unread]
        return found

    # -- the end ------------------------------------------------------------------------------------------------------

    def _wait_for_the_rest(self, admin: AdminClient) -> None:
        """Wait until each message that is missing has an end that no time changes."""
        until_s = time.monotonic() + PATIENCE_S
        rest = self.books.missing()
        while rest and time.monotonic() < until_s:
            moving = []
            for group, message_id in rest:
                fate = _fate(admin, group, self.books.sent[message_id].topic, message_id)
                if fate.is_moving(self._now_ms()):
                    moving.append((group, message_id))
            acked = self.books.acked
            rest = [each for each in moving if each[1] not in acked[each[0]]]
            self._ends_receiving.wait(0.2)

    def _may_end_so(self, group: str, message_id: str, sent: Sent, fate: Fate) -> bool:
        if fate.of_group == admin_v1.ACKNOWLEDGED:  # and the answer was lost
            return message_id in self.books.ever_seen[group]
        if fate.of_group in {admin_v1.DEAD, admin_v1.FINISHED}:  # the latter by an operator, or as ACKNOWLEDGED
            return True
        match fate.of_message:
            case admin_v1.RECALLED:
                return message_id in self.books.cancelled or sent.may_be_cancelled
            case admin_v1.REPLACED | admin_v1.ABSORBED:
                return bool(sent.own_key)
            case admin_v1.WAITING:
                return fate.deliver_at_ms > self._now_ms()  # an operator moved it, by a clock that was ahead
        return False

    # -- who works ----------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        def watched() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._failures.append(error)
                self._ends.set()
                raise

        thread = threading.Thread(target=watched, name=f"{work.__name__} {arguments}", daemon=True)
        thread.start()
        return thread

    def _rng(self, *who: object) -> random.Random:
        return random.Random(f"{self._seed} {who}")

    def _client(self, name: str) -> WireClient:
        return WireClient(self._daemon.address, name, self._signer)

    def _now_ms(self) -> int:
        """What the daemon's clock says."""
        return time.time_ns() // 1_000_000 + self._ahead_ms

    def _step(self, ahead_ms: int) -> None:
        if self._shim is not None:
            self._ahead_ms = ahead_ms
            self._shim.step(ahead_ms)

    def _insist(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """Ask until it is answered, and by no delay while there is time; ``None`` if nobody answers for too long.

        ``ask`` notes what the answer says.
        """
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            with suppress(grpc.RpcError), self.books.gate.passed():
                answer = ask()
                if answer.status.code != wire.TOO_MANY_REQUESTS or self._ends.is_set():
                    return answer
            time.sleep(_PAUSE_S)
        return None

    def _send(self, number: int) -> None:
        rng, books = self._rng("send", number), self.books
        with self._client(f"sender-{number}") as client:
            while not self._ends.wait(rng.uniform(0, 0.02)):
                message, sent = self._draw(rng)
                message_id = message.system_properties.message_id
                with books.lock:
                    books.sent[message_id] = sent
                answer = self._insist(partial(self._send_once, client, message, sent))
                if answer is None or answer.status.code != wire.OK:
                    books.refused[f"send: {answer and answer.status}"] += 1
                    continue
                if sent.resolution in {"commit", "rollback"}:
                    self._resolve(client, message, sent, answer.entries[0].transaction_id)
                if sent.recall_handle and rng.random() < 0.1:
                    self._recall(client, sent)

    def _send_once(self, client: WireClient, message: wire.Message, sent: Sent) -> wire.SendMessageResponse:
        answer = client.send(message)
        if answer.status.code == wire.OK:
            (entry,) = answer.entries
            with self.books.lock:
                sent.is_accepted, sent.stored_as, sent.recall_handle = True, entry.message_id, entry.recall_handle
        return answer

    def _draw(self, rng: random.Random) -> tuple[wire.Message, Sent]:
        topic = rng.choice(TOPICS)
        sent = Sent(
            topic,
            deliver_at_ms=self._now_ms() + rng.randrange(4_000) if rng.random() < 0.6 else 0,
            own_key="",
            resolution="",
        )
        properties: dict[str, str] = {}
        if topic == KEYED and rng.random() < 0.5:
            sent.own_key = properties["DMQ_KEY"] = f"key-{rng.randrange(6)}"
            if rng.random() < 0.4:
                properties["DMQ_ON_SAME_KEY"] = "keep"
        if rng.random() < 0.05:
            not_after_ms = max(sent.deliver_at_ms, self._now_ms()) + rng.randrange(2_000, 20_000)
            properties["DMQ_NOT_AFTER_MS"] = str(not_after_ms)
        message = a_message(
            topic,
            f"{rng.getrandbits(136):034X}",
            bytes(rng.choice((10, 500, 20_000))),
            deliver_at_ms=sent.deliver_at_ms,
            properties=properties,
            message_group=f"line-{rng.randrange(4)}" if topic == ORDERED else "",
        )
        if topic != ORDERED and rng.random() < 0.08:
            sent.resolution = rng.choice(("commit", "commit", "rollback", "none"))
            message.system_properties.message_type = wire.TRANSACTION
        return message, sent

    def _resolve(self, client: WireClient, message: wire.Message, sent: Sent, transaction_id: str) -> None:
        request = wire.EndTransactionRequest(
            topic=message.topic,
            message_id=message.system_properties.message_id,
            transaction_id=transaction_id,
            resolution=wire.COMMIT if sent.resolution == "commit" else wire.ROLLBACK,
        )

        def resolve() -> wire.EndTransactionResponse:
            answer: wire.EndTransactionResponse = client.ask("EndTransaction", request)
            sent.is_resolved = answer.status.code == wire.OK
            return answer

        answer = self._insist(resolve)
        if not sent.is_resolved:  # the clock was set, say, and it was decided by then
            self.books.refused[f"resolve: {answer and answer.status}"] += 1

    def _recall(self, client: WireClient, sent: Sent) -> None:
        request = wire.RecallMessageRequest(topic=wire.Resource(name=sent.topic), recall_handle=sent.recall_handle)
        try:
            with self.books.gate.passed():
                if client.ask("RecallMessage", request).status.code == wire.OK:
                    with self.books.lock:
                        self.books.cancelled.add(sent.stored_as)
        except grpc.RpcError:
            sent.may_be_cancelled = True

    def _consume(self, group: str, topic: str, is_push: bool) -> None:
        rng, books = self._rng("consume", group, topic, is_push), self.books
        with self._client(f"consumer-{group}-{topic}-{is_push}") as client:
            while not self._ends_receiving.is_set():
                request = a_receive(topic, group, batch=rng.choice((1, 8, 32)), wait_s=0.5, invisible_s=INVISIBLE_S)
                request.auto_renew = is_push
                try:
                    with books.gate.passed():
                        found = received_of(client.frames("ReceiveMessage", request, deadline_s=6))
                        books.see(group, (each.message_id for each in found))
                except grpc.RpcError:
                    time.sleep(_PAUSE_S)
                    continue
                with suppress(grpc.RpcError):
                    self._finish(client, rng, group, topic, found, is_push=is_push)

    def _finish(
        self,
        client: WireClient,
        rng: random.Random,
        group: str,
        topic: str,
        found: Sequence[Received],
        *,
        is_push: bool,
    ) -> None:
        done = []
        for each in found:
            drawn = 0.0 if self._is_careful.is_set() else rng.random()
            if drawn < 0.8:
                done.append(each)
            elif drawn < 0.86 or is_push:
                client.change_invisible(topic, group, each, rng.choice((0, 10, 500, 12_000)))
            elif drawn < 0.93:
                bury(client, topic, group, each)
        if done:
            with self.books.gate.passed():
                answer = client.ack(topic, group, done)
                with self.books.lock:
                    self.books.acked[group].update(
                        each.message_id
                        for each, entry in zip(done, answer.entries, strict=True)
                        if entry.status.code == wire.OK
                    )

    def _read(self, topic: str) -> None:
        """Read every queue of a topic by offset, again from where the group is whenever the daemon was away."""
        group = wire.Resource(name=READERS)
        with self._client(f"reader-{topic}") as client:
            while True:
                is_last = self._ends_receiving.is_set()
                try:
                    with self.books.gate.passed():  # a store that was put back may have fewer queues
                        route = client.ask("QueryRoute", wire.QueryRouteRequest(topic=wire.Resource(name=topic)))
                        for queue_id in {each.id for each in route.message_queues}:
                            queue = wire.MessageQueue(topic=wire.Resource(name=topic), id=queue_id)
                            self._read_queue(client, group, queue)
                except grpc.RpcError:
                    time.sleep(_PAUSE_S)
                    continue
                if is_last:
                    return
                self._ends_receiving.wait(0.2)

    def _read_queue(self, client: WireClient, group: wire.Resource, queue: wire.MessageQueue) -> None:
        asked = client.ask("GetOffset", wire.GetOffsetRequest(group=group, message_queue=queue))
        offset = asked.offset if asked.status.code == wire.OK else 0
        while True:
            request = wire.PullMessageRequest(group=group, message_queue=queue, offset=offset, batch_size=32)
            frames = client.frames("PullMessage", request)
            found = [each.message.system_properties.message_id for each in frames[1:-1]]
            self.books.see(READERS, found)
            if frames[0].status.code != wire.OK:
                assert frames[0].status.code in {wire.MESSAGE_NOT_FOUND, wire.TOO_MANY_REQUESTS}, frames[0]
                return
            offset = frames[-1].next_offset
            client.ask("UpdateOffset", wire.UpdateOffsetRequest(group=group, message_queue=queue, offset=offset))

    # -- trouble ------------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Kill, stop, kill a front, have processes stand still, restore a backup, salvage the store, set the clock."""
        rng, daemon = self._rng("disturb"), self._daemon
        while not self._ends.wait(rng.uniform(1.0, 4.0)):
            what = rng.choice(("kill", "kill", "stop", "front", "standstill", "clock", "restore", "salvage"))
            if what == "kill":
                daemon.kill()
                daemon.restart()
            elif what == "stop":
                daemon.stop()
                daemon.restart()
            elif what == "front" and (fronts := daemon.fronts):
                rng.choice(fronts).kill()
            elif what == "standstill":
                self._stand_still(rng)
            elif what == "clock" and self._shim is not None:
                self._step(rng.choice(STEPS_MS))
            elif what == "restore" and self.books.backups:
                self._restore(rng)
            elif what == "salvage":
                self._salvage(rng)
            else:  # there is no front, no clock to set, or no backup
                continue
            self.books.done[what] += 1

    def _stand_still(self, rng: random.Random) -> None:
        """Stop all processes for a while, as a machine does that is suspended, or the store's or a front alone."""
        store, fronts = psutil.Process(self._daemon.pid), self._daemon.fronts
        stopped = rng.choice(([store, *fronts], [store], rng.sample(fronts, min(1, len(fronts)))))
        for each in stopped:
            each.suspend()
        self._ends.wait(rng.choice(STANDSTILLS_S))
        for each in stopped:
            each.resume()

    def _restore(self, rng: random.Random) -> None:
        """Go on with a backup in the place of the store, with one of before an earlier restore as well."""
        daemon = self._daemon
        with self.books.gate.closed():
            backup, page = rng.choice(self.books.backups)
            rng.choice((daemon.kill, daemon.stop))()
            shutil.rmtree(daemon.data)
            shutil.copytree(backup, daemon.data)
            self.books.put_back(page)
            daemon.restart()

    def _salvage(self, rng: random.Random) -> None:
        """Go on with what can be read of the store: all of it."""
        daemon, new = self._daemon, self._folder / "salvaged"
        with self.books.gate.closed():
            rng.choice((daemon.kill, daemon.stop))()
            saved = run_command("store", "salvage", str(daemon.data), str(new), timeout_s=PATIENCE_S)
            assert saved.returncode == 0, saved.stdout + saved.stderr
            shutil.rmtree(daemon.data)
            new.rename(daemon.data)
            daemon.restart()

    def _operate(self) -> None:
        rng, books = self._rng("operate"), self.books
        with self.admin() as admin, self._client("operator") as client:
            orders = Orders(admin, client, rng, books, now_ms=self._now_ms, backups=self._folder)
            while not self._ends.wait(rng.uniform(0, 0.1)):
                name, order = orders.draw()
                try:
                    with books.gate.passed():
                        order()
                    books.done[name] += 1
                except _AWAY as error:
                    books.refused[f"{name}: {str(error).splitlines()[0][:120]}"] += 1


class Fate(NamedTuple):
    """Where a message is, for a group, as the daemon tells."""

    of_message: int  # admin_v1.MessageState
    of_group: int
    deliver_at_ms: int

    def is_moving(self, now_ms: int) -> bool:
        """Whether time alone changes it, or a consumer that is there."""
        if self.of_message == admin_v1.WAITING:
            return self.deliver_at_ms <= now_ms + _SOON_MS
        return self.of_group in {admin_v1.READY, admin_v1.LEASED, admin_v1.RETRYING}

    def __str__(self) -> str:
        name = admin_v1.MessageState.Name
        return f"{name(self.of_message)}, {name(self.of_group)} for the group, due at {self.deliver_at_ms}"


def _fate(admin: AdminClient, group: str, topic: str, message_id: str) -> Fate:
    found = admin.message(topic, message_id)
    of_group = {each.group: each.state for each in found.groups}.get(group, admin_v1.MESSAGE_STATE_UNSPECIFIED)
    return Fate(found.state, of_group, found.deliver_at_ms)
