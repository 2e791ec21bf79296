"""Run of the demo: a daemon, a producer and a consumer; a kill in the middle; and the verdict."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console

from broker_adapter.runtime.clock import Clock, SystemClock
from dmq.admin.client.client import AdminClient
from dmq.config.units import format_delay_levels, format_duration
from dmq.demo.behind import Behind, in_doubt
from dmq.demo.children import Client, Daemon, DemoFailed, clean_environment, free_port
from dmq.demo.ledger import Ledger
from dmq.demo.plan import LEVELS, Plan, make_plan
from dmq.demo.result import Life, lines_of, missing_lines
from dmq.demo.screen import Screen
from dmq.demo.verdict import Outage, Verdict, judge
from dmq.errors import DmqError
from dmq.states import MessageState

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

TOPIC = "demo"
GROUP = "demo-consumers"
GRACE_BEHIND_S = 90.0  # the same in front of a cluster, whose broker needs longer to restart
GRACE_S = 30.0  # beyond the planned end, for redeliveries after the invisible duration
DOWN_S = 0.5  # between the kill and the new start
LINGER_S = 1.0  # after the last message, to detect unexpected repetitions
STATUS_EVERY_S = 0.5
CLIENT_READY_WITHIN_S = 20.0
_INTERRUPTED = 130

_CLIENT_MISSING = (
    "The demo drives the daemon with the official RocketMQ client for Python, which is not installed.\n"
    "In a checkout `make demo` installs it; elsewhere: pip install 'rock-dmq[server,demo]'"
)


def show(*, messages: int, seconds: float, keep_data: bool, kill: bool, behind: Behind | None = None) -> int:
    """Run the demo; see ``dmq.demo.run``. If the daemon forwards to a cluster, a broker of it is killed too."""
    console = Console()
    if importlib.util.find_spec("rocketmq") is None:
        console.print(_CLIENT_MISSING, soft_wrap=True, highlight=False, markup=False)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="rock-dmq-demo-"))
    code = 1
    try:
        with ended_by_sigterm():
            plan = make_plan(messages, seconds, Random())
            code = _Run(console, SystemClock(), folder, plan, behind).run(kill=kill)
    except KeyboardInterrupt:
        console.print("interrupted; the processes are ended")
        code, keep_data = _INTERRUPTED, False
    except DmqError as error:
        console.print(f"demo: {error}", soft_wrap=True, highlight=False, markup=False)
    finally:
        if keep_data or code == 1:
            console.print(f"data and logs are kept in {folder}", soft_wrap=True, highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End the demo in order on SIGTERM too, as CI systems send it."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class _Run:
    console: Console
    clock: Clock
    folder: Path
    plan: Plan
    behind: Behind | None
    address: str = ""
    ledger: Ledger = field(init=False)
    screen: Screen = field(init=False)
    daemon: Daemon = field(init=False)
    outage: Outage | None = None
    lives: list[Life] = field(default_factory=list)  # of the daemon, the current one last
    clients: list[Client] = field(default_factory=list)
    _admin: AdminClient | None = None
    _polled_s: float = 0.0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.plan)
        self.screen = Screen(self.console, self.clock, self.plan, self.ledger)
        self.address = f"127.0.0.1:{free_port(Random())}"
        home = self.folder / "home"
        home.mkdir()
        config = self.folder / "demo.toml"
        config.write_text(self._config(), encoding="utf-8")
        self.daemon = Daemon(config, self.folder / "daemon.log", clean_environment(home), self.clock)

    @property
    def topic(self) -> str:
        """Topic of the sends."""
        return TOPIC if self.behind is None else self.behind.topic

    @property
    def group(self) -> str:
        """Consumer group."""
        return GROUP if self.behind is None else self.behind.group

    def run(self, *, kill: bool) -> int:
        verdict = self._play(kill=kill)
        self.screen.final(["", *lines_of(verdict, self.outage, self.lives)])
        return verdict.exit_code

    def _play(self, *, kill: bool) -> Verdict:
        with ExitStack() as stack:
            stack.enter_context(self.screen)
            stack.callback(self.daemon.kill)  # the last resort: an orderly stop comes first
            stack.callback(self._drop_admin)
            self._start_daemon()
            self.screen.event(
                f"daemon serving at {self.address}; of its {LEVELS} delay levels, shortened by delay_levels,"
                f" level {LEVELS} = {format_duration(self.plan.levels_ms[-1])} in this demo"
            )
            for role in ("consumer", "producer"):
                self._start_client(role, stack)
            self.screen.begin()
            self.screen.event(f"sending {len(self.plan.sends):,} messages, receiving and acknowledging them")
            is_whole = self._watch(is_to_kill=kill)
            self._look(now=True)
            verdict = self._judge()
            if not is_whole:
                self.screen.event("the time is up")
                self._tell_missing(verdict)
            for client in self.clients:
                client.stop()
            code = self.daemon.stop()
            self.screen.event(f"daemon stopped in order, exit code {code}")
            return verdict if self.behind is None else self._judge(in_doubt(self.folder / "data" / "trail"))

    def _watch(self, *, is_to_kill: bool) -> bool:
        """Wait for the run; return True if every message came in time."""
        nap = threading.Event()
        deadline_s = self.plan.end_ms / 1000 + (GRACE_S if self.behind is None else GRACE_BEHIND_S)
        while self.screen.elapsed_s < deadline_s:
            nap.wait(0.05)
            if is_to_kill and self.screen.elapsed_s * 1000 >= self.plan.kill_at_ms:
                is_to_kill = False
                self._kill_and_restart(nap)
            if not self.daemon.pid:
                raise DemoFailed(f"the daemon ended by itself: {self.daemon.last_words()}")
            for client in self.clients:
                client.check()
            self._look()
            self.screen.tick()
            if not is_to_kill and self.ledger.is_settled():
                nap.wait(LINGER_S)
                return True
        return False

    def _kill_and_restart(self, nap: threading.Event) -> None:
        self._look(now=True)
        total = self.ledger.total()
        killed_at_ms, killed_s = self.clock.now_ms(), self.clock.monotonic_s()
        self.daemon.kill()
        if self.behind is not None:
            self.behind.kill()
        self.screen.daemon.state, self.screen.daemon.pid = "KILLED", 0
        counts = f"{total.sent:,} sent, {total.received:,} received"
        whom = "daemon" if self.behind is None else "daemon and to the broker behind it"
        self.screen.event(f"SIGKILL to the {whom} ({counts})")
        nap.wait(DOWN_S)
        self._start_daemon()
        down_s = self.clock.monotonic_s() - killed_s
        self.lives[-1].down_s = down_s
        opened = f"store open in {self.lives[-1].open_ms:.0f} ms"
        self.screen.event(f"daemon serving again on the same port and data after {down_s:.2f} s, {opened}")
        if self.behind is not None:
            self.behind.start()
            down_s = self.clock.monotonic_s() - killed_s
            self.screen.event(f"broker serving again after {down_s:.2f} s; sends were accepted without it")
        self.outage = Outage(
            killed_at_ms=killed_at_ms, serving_at_ms=self.clock.now_ms(), is_of_broker=self.behind is not None
        )

    def _judge(self, in_doubt: Mapping[str, int] = MappingProxyType({})) -> Verdict:
        if self.outage is not None:
            back_ms = self.ledger.first_received_after(self.outage.serving_at_ms)
            self.outage = replace(self.outage, received_at_ms=back_ms)
        planned_ms = {send.number: send.delay_ms for send in self.plan.sends}
        ledger = self.ledger
        return judge(planned_ms, list(ledger.sent), list(ledger.received), list(ledger.acked), self.outage, in_doubt)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _config(self) -> str:
        levels = format_delay_levels(self.plan.levels_ms)
        data = self.folder / "data"
        config = f'data = "{data}"\nlisten = "{self.address}"\nmetrics_listen = "off"\ndelay_levels = "{levels}"\n'
        if self.behind is not None:
            config += f'broker = "rocketmq"\nendpoints = "{";".join(self.behind.endpoints)}"\n'
        return config

    def _start_daemon(self) -> None:
        took_s = self.daemon.start()
        self._drop_admin()
        # A channel that lost the daemon would wait before it reconnects.
        self._admin = AdminClient(self.address, timeout_s=2)
        self.lives.append(Life(start_s=took_s))
        self._look(now=True)

    def _start_client(self, role: str, stack: ExitStack) -> None:
        order: dict[str, object] = {"address": self.address, "topic": self.topic, "group": self.group}
        if role == "producer":
            order["sends"] = [
                {
                    "number": send.number,
                    "at_ms": send.at_ms,
                    "kind": send.kind.value,
                    "delay_ms": send.delay_ms,
                    "level": send.level,
                }
                for send in self.plan.sends
            ]
        self.ledger.ready.clear()
        environment = clean_environment(self.folder / "home")
        client = Client(role, order, self.folder / f"{role}.log", environment, self.ledger.take)
        self.clients.append(client)
        stack.callback(client.stop)  # before the start, because an interrupt may come during it
        client.start()
        if not self.ledger.ready.wait(CLIENT_READY_WITHIN_S):
            client.check()
            raise DemoFailed(f"the {role} does not connect: {self.ledger.last_trouble or 'it said nothing'}")

    # -- status of the daemon -----------------------------------------------------------------------------------------

    def _drop_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _look(self, *, now: bool = False) -> None:
        if self._admin is None or (not now and self.clock.monotonic_s() - self._polled_s < STATUS_EVERY_S):
            return
        self._polled_s = self.clock.monotonic_s()
        try:
            found: wire.GetStatusResponse = self._admin.status()
        except DmqError:
            return  # the watcher of the process reports it
        self.lives[-1].note(found)
        shown = self.screen.daemon
        shown.state, shown.pid, shown.pending = "serving", self.daemon.pid, found.timeline.pending
        shown.now_ms, shown.next_due_at_ms = found.now_ms, found.timeline.next_due_at_ms

    def _tell_missing(self, verdict: Verdict) -> None:
        ids = {each.number: each.message_id for each in self.ledger.sent}

        def where(number: int) -> str:
            if self._admin is None or number not in ids:
                return ""
            try:
                state = MessageState(self._admin.message(self.topic, ids[number]).state)
            except DmqError as error:
                return str(error)
            return f"the daemon says: {state.name.lower()}"

        for line in missing_lines(verdict, self.plan, where):
            self.screen.event(line)
        if self.ledger.last_trouble:
            self.screen.event(f"the clients' last trouble: {self.ledger.last_trouble}")
