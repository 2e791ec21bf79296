"""SIGKILL while messages are recalled when they are due: what a recall was told stays true.

``DMQ_TEST_CRASHES=200`` makes a long run of it, ``DMQ_TEST_SEED`` repeats the choices of one (not its timing).
"""

# ruff: noqa: ANN401 - one class of answers per RPC

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.wire.client import WireClient, a_message
from support.effort import CRASHES, SEED
from support.models.store.outbox import read_outbox
from support.rigs.daemon.process import Daemon

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import EventKind, gap_event

pytestmark = pytest.mark.fault

TOPIC, GROUP = "recalled", "receivers"
THREADS = 6
KILLS = max(3, CRASHES // 4)
_GIVE_UP_S = 30.0


class Ledger:
    """What was answered."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.sent: set[str] = set()
        self.recalled: set[str] = set()
        self.delivered: set[str] = set()  # as the answer to a recall says
        self.strange: list[str] = []
        self.repeated_total = 0

    def note(self, message_id: str, status: wire.Status) -> None:
        """Keep the answer to a recall."""
        with self.news:
            if status.code == wire.OK:
                self.recalled.add(message_id)
                self.repeated_total += "recalled already" in status.message
            elif status.code == wire.MESSAGE_NOT_FOUND and "delivered at" in status.message:
                self.delivered.add(message_id)
            else:
                self.strange.append(f"{message_id}: {status}")
            self.news.notify_all()

    def wait_for(self, recalls: int) -> None:
        """Wait until so many more were recalled."""
        with self.news:
            wanted = len(self.recalled) + recalls
            assert self.news.wait_for(lambda: len(self.recalled) >= wanted, timeout=_GIVE_UP_S), self.strange


class Producer(threading.Thread):
    """Sends messages that are due in a moment and recalls them about then; repeats a call whose answer was lost."""

    def __init__(self, number: int, address: str, ledger: Ledger, is_over: threading.Event) -> None:
        super().__init__(name=f"producer-{number}", daemon=True)
        self._number = number
        self._address = address
        self._ledger = ledger
        self._is_over = is_over
        self._rng = random.Random(SEED + number)
        self._clock = SystemClock()

    def run(self) -> None:
        """Go on until told to end."""
        with WireClient(self._address, f"producer-{self._number}") as client:
            count = 0
            while not self._is_over.is_set():
                due_ms = self._clock.now_ms() + self._rng.choice((30, 60, 3_600_000))
                names = [f"{self._number}-{count + each}" for each in range(8)]
                count += len(names)
                messages = [a_message(TOPIC, name, deliver_at_ms=due_ms) for name in names]
                sent = self._ask(client, "SendMessage", wire.SendMessageRequest(messages=messages))
                if sent is None:
                    return
                with self._ledger.news:
                    self._ledger.sent.update(names)
                self._is_over.wait(max(0.0, min(0.06, (due_ms - self._clock.now_ms()) / 1000 - 0.003)))
                # What is due in an hour is recalled always: the test ends before.
                for entry in sent.entries:
                    if not entry.recall_handle:  # it came when it was due already
                        continue
                    request = wire.RecallMessageRequest(
                        topic=wire.Resource(name=TOPIC), recall_handle=entry.recall_handle
                    )
                    answer = self._ask(client, "RecallMessage", request)
                    if answer is None:
                        return
                    self._ledger.note(entry.message_id, answer.status)

    def _ask(self, client: WireClient, rpc: str, request: object) -> Any:
        until_s = self._clock.monotonic_s() + _GIVE_UP_S
        while self._clock.monotonic_s() < until_s:
            try:
                answer = client.ask(rpc, request)
            except grpc.RpcError:  # it is dead, or not there yet
                threading.Event().wait(0.02)
                continue
            if answer.status.code < 50000:
                return answer
        with self._ledger.news:
            self._ledger.strange.append(f"{rpc}: no answer")
        return None


@pytest.mark.timeout(180 + 8 * KILLS)
def test_a_recall_that_was_answered_stays_true(tmp_path: Path) -> None:
    """Recalled: it never comes. Delivered: it comes. Neither was told: it comes. However often the daemon is killed."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng, ledger, is_over = random.Random(SEED), Ledger(), threading.Event()
    came: set[str] = set()
    # The outbox is the trail here: nothing is exported out of it.
    with Daemon(tmp_path / "data", env={**os.environ, "DMQ_TRAIL": "off"}) as daemon:
        producers = [Producer(number, daemon.address, ledger, is_over) for number in range(THREADS)]
        for producer in producers:
            producer.start()
        for _ in range(KILLS):
            ledger.wait_for(rng.randint(20, 200))
            daemon.kill()
            daemon.restart()
        is_over.set()
        for producer in producers:
            producer.join(_GIVE_UP_S)
        assert not ledger.strange, ledger.strange[:5]
        with WireClient(daemon.address) as client:
            while found := client.receive(TOPIC, GROUP, wait_s=0.5):
                assert client.ack(TOPIC, GROUP, found).status.code == wire.OK
                assert not came & {each.message_id for each in found}, "twice"
                came |= {each.message_id for each in found}
        daemon.stop()
    store = Store.open(tmp_path / "data", SystemClock(), StoreOptions(gap_event=gap_event))
    try:
        kinds = [each.event.kind for each in read_outbox(store)]
        waiting = sum(store.pending().values())
    finally:
        store.close()
    print(
        f"{KILLS} kills, {len(ledger.sent)} sent, {len(ledger.recalled)} recalled ({ledger.repeated_total} repeated), "
        f"{len(ledger.delivered)} too late, {len(came)} came"
    )
    assert not ledger.recalled & came, "recalled, and came all the same"
    assert ledger.delivered <= came, "said to be delivered, and never came"
    assert ledger.sent - ledger.recalled == came & ledger.sent, "neither"
    assert not waiting
    assert kinds.count(EventKind.RECALLED) == len(ledger.recalled)
    assert ledger.delivered, "no recall was too late: the race was not run"
