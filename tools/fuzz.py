"""Look for input that costs a daemon more than it should: a coverage-guided fuzzer over whole connections.

``make fuzz`` runs it (``ARGS="-max_total_time=3600"`` for an hour). It begins with tests/corpus, changes what it finds
there, and keeps in build/fuzz what reaches code that nothing before it reached. Input that costs too much, or that ends
in an exception, is written to tests/corpus as ``found-*.bin``: from then on ``make test`` judges it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import sys
import threading
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["dmq", "broker_adapter"]):
    import structlog
    from support.models.costs.cost_oracle import CORPUS, Cost, with_preface
    from support.rigs.broker.memory_broker import MemoryBroker

    from broker_adapter.runtime.clock import SystemClock
    from dmq.rocketmq_server.calls.dispatch import Dispatcher
    from dmq.rocketmq_server.rpc.service import MessagingService
    from dmq.rocketmq_server.sessions.sessions import Sessions
    from dmq.rocketmq_server.sessions.settings import SidecarConfig
    from dmq.rocketmq_server.transport.http2_server import Http2Transport, Port

BUILD = Path(__file__).resolve().parents[1] / "build" / "fuzz"
INPUT_BYTES_MAX = 128 * 1024
SLOWER = 10.0  # instrumented code, against the same code as it runs in a daemon
TRIES = 3  # what is expensive once may have been unlucky
ANSWER_S_MAX = 30.0


class Target:
    """Everything from the socket to the broker, in a thread whose processor time can be read."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self.faults: list[str] = []
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        self._started.wait()
        assert thread.ident is not None
        self._cpu_clock = time.pthread_getcpuclockid(thread.ident)

    def _run(self) -> None:
        async def serve() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
            clock = SystemClock()
            service = MessagingService(MemoryBroker(clock), clock, Sessions(clock), SidecarConfig())
            port = Port(service, Dispatcher(service, clock=clock))
            transport = Http2Transport(port, host="127.0.0.1", port_number=0, monotonic_s=clock.monotonic_s)
            self.port = await transport.start()
            self._started.set()
            await asyncio.Event().wait()

        asyncio.run(serve())

    def cost_of(self, said: bytes) -> Cost:
        """Send one connection's bytes and wait until the server has closed it."""
        begun_s = time.clock_gettime(self._cpu_clock)
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.settimeout(ANSWER_S_MAX)
            try:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):
                    pass
            except TimeoutError:
                raise
            except OSError:  # it closed the connection while we spoke; then that one cannot be shut down either
                pass
        return Cost(len(said), (time.clock_gettime(self._cpu_clock) - begun_s) / SLOWER, 0)


def main() -> None:
    """Run until the options of the fuzzer say that it is enough."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    (BUILD / "reached").mkdir(parents=True, exist_ok=True)
    target = Target()

    def judge(data: bytes) -> None:
        said = with_preface(data)
        costs = [target.cost_of(said)]
        while costs[-1].excess() and len(costs) < TRIES:
            costs.append(target.cost_of(said))
        if not costs[-1].excess() and not target.faults:
            return
        kept = CORPUS / f"found-{hashlib.sha256(data).hexdigest()[:12]}.bin"
        kept.write_bytes(data)
        told = costs[-1].excess() or target.faults.pop()
        raise AssertionError(f"{told}; kept as {kept.name}")

    arguments = [*sys.argv, f"-max_len={INPUT_BYTES_MAX}", "-len_control=0", str(BUILD / "reached"), str(CORPUS)]
    atheris.Setup(arguments, judge)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
