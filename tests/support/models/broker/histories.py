"""Trails of real brokers in memory: random histories of the operator machine and of transactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random

from support.models.broker.operator_machine import GROUPS, TOPICS, OperatorRules
from support.rigs.broker.rig import End, ack, an_envelope, receive

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.transactions import Half
from dmq.broker.operations.admin import BEGIN, END
from dmq.broker.transactions.transaction_checks import CheckOptions
from dmq.store.writer.operations import Emit
from dmq.trail.events import EventKind, cell_event
from dmq.trail.export.exporter import Exporter
from dmq.trail.snapshots.snapshot import write_snapshot
from dmq.trail.snapshots.taking import directory_of

DEALS = "deals"
_CHECKS = CheckOptions(first_after_ms=6_000, every_ms=30_000, checks_max=2)


class RecordedHistory(OperatorRules):
    """One history of operators, consumers and transactions; ``write`` leaves its trail."""

    on_disk = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.halves: list[str] = []
        self.open(None)
        self.run(self._began())
        self.run(self.rig.broker.operator.create_topic(DEALS, queues=2, message_type=None))
        for group in GROUPS:
            self.run(self.rig.broker.subscriptions.subscribe(group, DEALS))

    async def _began(self) -> None:
        self.rig.broker.checks.options = _CHECKS
        await self.rig.store.commit_async([Emit(cell_event(EventKind.OPENED))])

    def begin_again(self, end: End, down_ms: int = 0) -> None:
        """As for the machine; the trail says that a run ended in order, and that one began."""
        if end is End.CLOSE:
            self.rig.store.commit([Emit(cell_event(EventKind.CLOSED))])
        super().begin_again(end, down_ms)

    async def after_start(self) -> None:
        """As for the machine."""
        await self._began()
        await super().after_start()

    def play(self, steps: int) -> None:
        """Play random steps."""
        for _ in range(steps):
            self.step_once()
        self.pass_time(1_000)

    def step_once(self) -> None:
        """Do one random thing; frequent ones have a greater weight."""
        random = self.random
        group, topic = random.choice(GROUPS), random.choice(TOPICS)
        delays = (None, None, 1_000, 61_000, 600_000)
        hows = random.choices(("ack", "ack", "fail", "give up"), k=3)
        steps: Mapping[Callable[[], object], int] = {
            lambda: self.send(topic, random.randint(1, 3), random.choice(delays)): 25,
            lambda: self.consume_each(group, topic, hows): 20,
            lambda: self.pass_time(random.choice((1, 1_000, 5_000, 31_000))): 10,
            lambda: self.prepare(random.choice((0, 0, 20_000))): 10,
            lambda: self.decide(commits=random.random() < 0.8): 12,
            lambda: self.finish_deals(group): 7,
            lambda: self.reset(group, topic, random.choice((BEGIN, END, 5_000)), 0, dies=False): 4,
            lambda: self.remove_group(group, 0, dies=False): 2,
            lambda: self.remove_topic(topic, 0, dies=False): 2,
            lambda: self.redrive(group, random.choice(("", "all")), 0, dies=False): 2,
            lambda: self.purge(group, 0, dies=False): 1,
            lambda: self.keep(topic, random.choice((None, 60, 3_600)), unread=random.random() < 0.5): 1,
            lambda: self.add_a_queue(topic): 1,
            self.restart_once: 3,
        }
        random.choices(list(steps), list(steps.values()))[0]()

    def restart_once(self) -> None:
        """End the run, in order or not, and begin another one."""
        self.begin_again(self.random.choice((End.CLOSE, End.KILL)), self.random.choice((0, 1_500)))
        self.settle()

    # -- transactions -------------------------------------------------------------------------------------------------

    def prepare(self, delay_ms: int) -> None:
        """Accept a half message."""
        self.numbers += 1
        half = Half(an_envelope(f"deal-{self.numbers}", topic=DEALS), delay_ms)
        (receipt,) = self.run(self.rig.broker.transactions.prepare([half]))
        self.halves.append(receipt.transaction_id)

    def decide(self, *, commits: bool) -> None:
        """Commit or roll back one of the half messages, which may have been given up."""
        if self.halves:
            chosen = self.halves.pop(self.random.randrange(len(self.halves)))
            transactions = self.rig.broker.transactions
            with suppress(Refused):
                self.run((transactions.commit if commits else transactions.roll_back)(DEALS, chosen))

    def finish_deals(self, group: str) -> None:
        """Acknowledge committed messages."""
        found = self.run(receive(self.rig, group=group, topic=DEALS))
        self.run(ack(self.rig, *found, group=group, topic=DEALS))

    # -- the trail ----------------------------------------------------------------------------------------------------

    def write(self, trail: Path) -> None:
        """Export the trail and a snapshot, and end."""
        try:
            exporter = Exporter(self.rig.store, trail)
            exporter.recover()
            self.rig.store.commit([Emit(cell_event(EventKind.HEARTBEAT))])
            exporter.flush()
            cell, sequence = self.rig.store.cell_id, self.rig.store.outbox_state.next_sequence - 1
            where = directory_of(trail, cell) / f"{sequence:020}"
            write_snapshot(self.engine, where, cell=cell, taken_ms=self.clock.now_ms())
            self.run(self.rig.close())
            assert not self.strays, self.strays
        finally:
            self.loop.close()
            self.folder.cleanup()
