"""An application with the hook outlives its broker's outage, its own death in it, and another one while it catches up.

A minute passes for the application in 20 s: its sink has a clock that runs three times as fast. The broker's clock and
all timeouts of the client are real. ``DMQ_TEST_SEED`` repeats the choices of a run, not its timing.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from support.clients.official.hook_app import AppEnded, Consumer, Failed, HookApp
from support.effort import EFFORT, SEED
from support.rigs.daemon.process import Daemon

pytestmark = pytest.mark.fault

_TOPIC, _GROUP = "outage", "outage-group"
_LANES = (
    *("durable-on_failure", "durable-write_ahead", "handler-on_failure", "handler-write_ahead"),
    *("futures", "asyncio"),
)
_PROCESSES = 3  # one after the other; the last one ends in order
_KEYS = ("", "a", "b", "c")  # without a key: no order
SPEED = 3.0
OUTAGE_S = 60.0
PACE_S = (0.02, 0.08)  # between an outcome and the next send of a lane
_BEFORE, _AFTER = 20, 20  # sends of each lane that must get through before the outage, and behind it
_HURRY_S = 0.2  # without a pace before each blow, so that it meets sends that are under way
_RECOVERY_S_MAX = 60.0  # real: the client's channels try again after up to 15 s, the breaker after 30 s of its clock


@dataclass(slots=True, eq=False)
class Sent:
    """One send, and what the application had said of it when it ended; ``None``: nothing."""

    lane: str
    key: str
    number: int  # of its lane and key, in the order of the sends
    process: int
    answer: dict[str, Any] | None = None

    @property
    def outcome(self) -> str:
        return "unknown" if self.answer is None else str(self.answer["outcome"])

    @property
    def is_promised(self) -> bool:
        return self.outcome in {"delivered", "spooled"}

    @property
    def uid(self) -> str:
        return "" if self.answer is None else str(self.answer["uid"])

    @property
    def is_uncertain(self) -> bool:
        return self.answer is not None and bool(self.answer.get("is_uncertain", False))

    @property
    def place(self) -> tuple[str, str, int]:
        return self.lane, self.key, self.number


class Load:
    """One thread per lane sends until told to end, through whichever process there is."""

    def __init__(self, seed: int) -> None:
        self.sent: list[Sent] = []
        self.news = threading.Condition()
        self._app: HookApp | None = None
        self._process = 0
        self._is_ending = threading.Event()
        self._hurries = threading.Event()
        self._pool = ThreadPoolExecutor(len(_LANES))
        self._lanes: list[Future[None]] = [
            self._pool.submit(self._send_all, lane, random.Random(f"{seed}-{lane}")) for lane in _LANES
        ]

    def use(self, app: HookApp) -> None:
        """Send through ``app`` from here on."""
        with self.news:
            self._app, self._process = app, self._process + 1
            self.news.notify_all()

    def hurry(self, blow: Callable[[], None]) -> None:
        """Send as fast as it goes for a moment, and call ``blow`` in it."""
        self._hurries.set()
        threading.Event().wait(_HURRY_S)
        blow()
        self._hurries.clear()

    def wait_for(self, outcome: str, each: int, *, after: int, within_s: float) -> None:
        """Wait until each lane had ``each`` further sends with this outcome, counted from the send ``after`` on."""

        def is_so() -> bool:
            count = Counter(sent.lane for sent in self.sent[after:] if sent.outcome == outcome)
            return all(count[lane] >= each for lane in _LANES)

        with self.news:
            assert self.news.wait_for(is_so, within_s), f"no {each} sends per lane were {outcome} in {within_s} s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Send no more; raises what went wrong in a lane."""
        self._is_ending.set()
        with self.news:
            self.news.notify_all()
        self._pool.shutdown()
        for lane in self._lanes:
            lane.result()

    def _send_all(self, lane: str, rng: random.Random) -> None:
        numbers: Counter[str] = Counter()
        self._wait_for_another(None)
        while not self._is_ending.wait(0 if self._hurries.is_set() else rng.uniform(*PACE_S)):
            key = rng.choice(_KEYS)
            numbers[key] += 1
            with self.news:
                app = self._app
                sent = Sent(lane, key, numbers[key], self._process)
                self.sent.append(sent)
            assert app is not None
            group = {"message_group": f"{lane}-{key}"} if key else {}
            try:
                sent.answer = app.send(lane, json.dumps(sent.place).encode(), topic=_TOPIC, **group)
            except AppEnded:
                self._wait_for_another(app)
                continue
            with self.news:
                self.news.notify_all()

    def _wait_for_another(self, app: HookApp | None) -> None:
        with self.news:
            self.news.wait_for(lambda: self._app is not app or self._is_ending.is_set())


class Arrivals:
    """What a consumer saw, by the place that each body names."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._read = 0
        self.order: list[tuple[str, str, int]] = []  # of first arrivals
        self.uids: defaultdict[tuple[str, str, int], list[str]] = defaultdict(list)

    def has_all(self, wanted: set[tuple[str, str, int]]) -> bool:
        """Look at what is new, and say whether all of ``wanted`` came."""
        news, self._read = self._consumer.messages[self._read :], len(self._consumer.messages)
        for message in news:
            lane, key, number = json.loads(message.body)
            if (lane, key, number) not in self.uids:
                self.order.append((lane, key, number))
            self.uids[lane, key, number].append(message.user_properties["DMQ_UID"])
        return wanted <= self.uids.keys()

    def out_of_order(self) -> list[str]:
        """Return where the first arrivals of a key are not in the order of its sends."""
        last: defaultdict[tuple[str, str], int] = defaultdict(int)
        found = []
        for lane, key, number in self.order:
            if key and number < last[lane, key]:
                found.append(f"{lane} {key}: {number} came after {last[lane, key]}")
            last[lane, key] = max(number, last[lane, key])
        return found


def _broken_promises(sent: list[Sent], arrivals: Arrivals, failed: list[Failed]) -> list[str]:
    """Return every way in which what arrived is not what the outcomes said."""
    in_doubt = {each.uid for each in failed if not each.is_certain}
    first_in_doubt = {each.uid for each in failed if each.is_first and not each.is_certain}
    broken = arrivals.out_of_order()
    for each in sent:
        uids = arrivals.uids.get(each.place, [])
        if each.is_promised and not uids:
            broken.append(f"lost: {each}")
        if len(set(uids)) > 1 or (each.answer is not None and uids and uids[0] != each.uid):
            broken.append(f"other uids {uids}: {each}")
        if len(uids) > 1 and not _may_repeat(each, in_doubt):
            broken.append(f"{len(uids)} times: {each}")
        if each.outcome == "spooled" and each.uid in first_in_doubt and not each.is_uncertain:
            broken.append(f"its attempt may have got through, and it was not called uncertain: {each}")
    places = {each.place for each in sent}
    broken += [f"never sent: {place}" for place in arrivals.uids if place not in places]
    return broken


def _may_repeat(sent: Sent, in_doubt: set[str]) -> bool:
    """Whether a second arrival is no surprise: an attempt was in doubt, or its process was killed with it in hand."""
    if sent.answer is None:
        return True
    if sent.uid in in_doubt or sent.is_uncertain:
        return True
    was_kept = sent.outcome == "spooled" or sent.lane.endswith("write_ahead")
    return sent.process < _PROCESSES and was_kept


def _left_s(since_s: float, virtual_s: float) -> float:
    return max(0.0, since_s + virtual_s / SPEED - time.monotonic())


def _is_catching_up(app: HookApp) -> None:
    """Return once a part of what waited was sent, and most of it was not."""
    most, until_s = 0, time.monotonic() + _RECOVERY_S_MAX
    while (waiting := app.do("stats")["waiting"]) > 0.8 * most:
        assert time.monotonic() < until_s, f"{waiting} of {most} still wait"
        most = max(most, waiting)
        threading.Event().wait(0.02)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("run", range(EFFORT))
def test_nothing_is_lost_when_the_broker_is_away_and_the_application_dies(tmp_path: Path, run: int) -> None:
    """Every send that was Delivered or Spooled arrives, per key in the order of the sends, though the sidecar is away
    for a minute and the application is killed in it, and again while it sends what waited.
    """
    seed = SEED + run
    print(f"DMQ_TEST_SEED={seed}")
    rng = random.Random(seed)
    began_ms = time.time_ns() // 1_000_000
    kills_sidecar = rng.random() < 0.5
    dies_after_s = rng.uniform(6.0, OUTAGE_S - 15.0)  # of the outage, on the application's clock
    with (
        ExitStack() as apps,
        Daemon(tmp_path / "data") as daemon,
        Consumer(daemon.address, _TOPIC, _GROUP) as consumer,
        Load(seed) as load,
    ):

        def start(name: str) -> HookApp:
            root = tmp_path / "spool"
            app = HookApp(tmp_path / name, daemon.address, root, _TOPIC, speed=SPEED, since_ms=began_ms)
            load.use(apps.enter_context(app))
            return app

        first = start("first")
        load.wait_for("delivered", _BEFORE, after=0, within_s=20)
        load.hurry(daemon.kill if kills_sidecar else daemon.stop)
        away_since_s = time.monotonic()
        threading.Event().wait(_left_s(away_since_s, dies_after_s))
        load.hurry(first.kill)
        second = start("second")
        threading.Event().wait(_left_s(away_since_s, OUTAGE_S))
        daemon.restart()
        back_since_s = time.monotonic()
        _is_catching_up(second)
        load.hurry(second.kill)
        third = start("third")
        load.wait_for("delivered", _AFTER, after=len(load.sent), within_s=_RECOVERY_S_MAX)
        recovered_s = time.monotonic() - back_since_s
        load.end()
        arrivals = Arrivals(consumer)
        wanted = {each.place for each in load.sent if each.is_promised}
        consumer.receive_until(lambda: arrivals.has_all(wanted), within_s=_RECOVERY_S_MAX)
        arrived_s = time.monotonic() - back_since_s
        closed = third.do("close")
        while consumer.receive(wait_s=0.5):  # what comes twice
            pass
        arrivals.has_all(wanted)
        daemon.stop()

    failed = first.failed + second.failed + third.failed
    _report(load.sent, arrivals, failed)
    print(
        f"sidecar {'killed' if kills_sidecar else 'stopped'}, application killed {dies_after_s:.0f} s into the outage, "
        f"sends got through {recovered_s:.1f} s after it, all had arrived after {arrived_s:.1f} s; {closed}"
    )
    broken = _broken_promises(load.sent, arrivals, failed)
    assert not broken, f"{len(broken)} promises broken:\n" + "\n".join(broken[:30])
    assert closed["still_waiting"] == closed["dead"] == closed["running"] == closed["unsettled"] == 0
    spooled = Counter((each.process, each.lane) for each in load.sent if each.outcome == "spooled")
    assert all(spooled[process, lane] >= 10 for process in (1, 2) for lane in _LANES), f"too little load: {spooled}"


def _report(sent: list[Sent], arrivals: Arrivals, failed: list[Failed]) -> None:
    """Print what happened."""
    for process in range(1, _PROCESSES + 1):
        outcomes = Counter(each.outcome for each in sent if each.process == process)
        print(f"process {process}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    repeated = sum(len(uids) > 1 for uids in arrivals.uids.values())
    print(
        f"{len(arrivals.uids)} of {len(sent)} arrived, {repeated} of them more than once; "
        f"{len(failed)} attempts failed, {sum(not each.is_certain for each in failed)} of them in doubt"
    )
