"""The examples of web frameworks, of Celery and of consumers, each under its real server and against a real daemon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from support.clients.official.hook_app import Consumer
from support.clients.wire.client import WireClient, a_message
from support.effort import at_length
from support.rigs.daemon.process import Daemon, free_port, run_command

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent
_SOON_S = 60.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that each test leaves running."""
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as served:
        yield served


class Shop:
    """An example under its server, at a port of its own; leaving the context kills it."""

    def __init__(self, name: str, home: Path, daemon: Daemon, *command: str, has_spool: bool = True) -> None:
        assert (EXAMPLES / name).is_file()
        self.home, self.port = home, free_port()
        self.figures = home / "figures"
        self._said = (home / "said.txt").open("ab")
        self.process = subprocess.Popen(
            [str(BIN / command[0]), *(word.format(port=self.port) for word in command[1:])],
            cwd=home,
            env=os.environ
            | {
                "HOME": str(home),
                "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "SHOP_BROKER": daemon.address,
                "SHOP_TASKS": str(home / "tasks"),
                "DMQ_ADDRESS": daemon.address,
                "DMQ_SPOOL": str(home / "spool") if has_spool else "",
                "DMQ_HOOK_METRICS_DIR": str(self.figures),
                "DMQ_HOOK_STEPS": "200ms",
                "DMQ_HOOK_MAX_ATTEMPTS": "100",
            },
            stdout=self._said,
            stderr=self._said,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self.workers():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)
        self._said.close()
        print(f"--- {self.home}\n{self.said()[-8000:]}---")

    def said(self) -> str:
        return (self.home / "said.txt").read_text(encoding="utf-8", errors="replace")

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Return the status and the text of an answer, once there is one: the server may be about to start."""
        until_s = time.monotonic() + _SOON_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", body, timeout=30) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()
            except OSError:
                assert self.process.poll() is None, self.said()
                assert time.monotonic() < until_s, self.said()
                threading.Event().wait(0.1)

    def workers(self) -> list[int]:
        """The processes that have a hook and live."""
        return [pid for each in self.figures.glob("*.prom") if _lives(pid := int(each.name.partition("-")[0]))]

    def end(self) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_SOON_S)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _until(is_so: Callable[[], bool], shop: Shop) -> None:
    until_s = time.monotonic() + _SOON_S
    while not is_so():
        assert time.monotonic() < until_s, shop.said()
        threading.Event().wait(0.05)


def _arrive(daemon: Daemon, group: str, *bodies: bytes) -> None:
    with Consumer(daemon.address, "orders", group) as consumer:
        consumer.receive_until(lambda: {*bodies} <= {each.body for each in consumer.messages}, within_s=_SOON_S)
        assert {*bodies} <= {each.body for each in consumer.messages}


def test_an_order_is_sent_by_itself(daemon: Daemon, tmp_path: Path) -> None:
    """The part that the applications share is a program too."""
    with Shop("shop.py", tmp_path, daemon, "python", str(EXAMPLES / "shop.py")) as shop:
        assert shop.process.wait(_SOON_S) == 0
        assert shop.said() == "sent\n"
    _arrive(daemon, "by-itself", b"order 1")


def test_flask_under_gunicorn_loses_no_order(daemon: Daemon, tmp_path: Path) -> None:
    """The module is loaded before the fork. While the broker is away orders are kept; a worker that is killed leaves
    them to the one that takes its place, whose first request begins to send them; SIGTERM closes every hook.
    """
    server = ("gunicorn", "--preload", "--workers", "1", "--bind", "127.0.0.1:{port}", "flask_shop:app")
    with Shop("flask_shop.py", tmp_path, daemon, *server) as shop:
        assert shop.ask("/orders", b"flask 1") == (201, "sent")
        (worker,) = shop.workers()
        assert worker != shop.process.pid
        daemon.stop()
        try:
            assert shop.ask("/orders", b"flask 2") == (202, "kept")
            assert shop.ask("/hook/ready")[0] == 200
            os.kill(worker, signal.SIGKILL)
            _until(lambda: shop.ask("/hook/ready")[0] == 200 and worker not in shop.workers(), shop)
            kept = re.compile(r'^retry_hook_(waiting|held)\{pid="\d+"\} 1$', re.MULTILINE)
            _until(lambda: bool(kept.search(shop.ask("/hook/metrics")[1])), shop)
        finally:
            daemon.restart()
        _arrive(daemon, "flask", b"flask 1", b"flask 2")
        assert shop.end() == 0
        assert list(shop.figures.iterdir()) == []


def test_django_under_gunicorn(daemon: Daemon, tmp_path: Path) -> None:
    """Orders, figures, readiness, and the end, with a hook that keeps in the daemon."""
    server = ("gunicorn", "--workers", "1", "--bind", "127.0.0.1:{port}", "django_shop:application")
    with Shop("django_shop.py", tmp_path, daemon, *server, has_spool=False) as shop:
        assert shop.ask("/orders", b"django 1") == (201, "sent")
        assert json.loads(shop.ask("/hook/ready")[1])["ready"]
        assert 'type="order-created",outcome="delivered"} 1' in shop.ask("/hook/metrics")[1]
        _arrive(daemon, "django", b"django 1")
        assert shop.end() == 0
        assert list(shop.figures.iterdir()) == []


def test_fastapi_under_uvicorn(daemon: Daemon, tmp_path: Path) -> None:
    """The hook is open before the first request, and closed after the last one."""
    with Shop("fastapi_shop.py", tmp_path, daemon, "uvicorn", "--port", "{port}", "fastapi_shop:app") as shop:
        assert json.loads(shop.ask("/hook/ready")[1]) == {"ready": True, "status": "healthy", "reasons": []}
        assert shop.ask("/orders", b"fastapi 1") == (201, "sent")
        assert 'type="order-created",outcome="delivered"} 1' in shop.ask("/hook/metrics")[1]
        _arrive(daemon, "fastapi", b"fastapi 1")
        assert shop.end() == -signal.SIGTERM  # it raises the signal once more after the end of the application
        assert list(shop.figures.iterdir()) == []


@at_length
def test_fastapi_with_several_workers(daemon: Daemon, tmp_path: Path) -> None:
    """Each has a hook of its own, and a scrape of any of them tells of all."""
    server = ("uvicorn", "--workers", "2", "--port", "{port}", "fastapi_shop:app")
    with Shop("fastapi_shop.py", tmp_path, daemon, *server) as shop:
        _until(lambda: len(shop.workers()) == 2, shop)
        pids = set(re.findall(r'^retry_hook_waiting\{pid="(\d+)"\}', shop.ask("/hook/metrics")[1], re.MULTILINE))
        assert pids == {str(pid) for pid in shop.workers()}
        shop.end()
        assert list(shop.figures.iterdir()) == []


def test_a_celery_worker_starts_and_ends_the_hook_of_its_pool(daemon: Daemon, tmp_path: Path) -> None:
    """A task's order arrives; the hook is that of the process that runs tasks, from its start to its end."""
    (tmp_path / "tasks").mkdir()
    worker = ("celery", "--app", "celery_shop", "worker", "--concurrency", "1", "--without-gossip", "--without-mingle")
    with Shop("celery_shop.py", tmp_path, daemon, *worker) as shop:
        _until(lambda: bool(shop.workers()), shop)
        assert shop.process.pid not in shop.workers()
        _send_task(tmp_path, "celery 1")
        _arrive(daemon, "celery", b"celery 1")
        assert shop.end() == 0
        assert list(shop.figures.iterdir()) == []


def _send_task(home: Path, body: str) -> None:
    code = "import sys; from celery_shop import create_order; create_order.delay(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, body],
        cwd=EXAMPLES,
        env=os.environ | {"HOME": str(home), "SHOP_TASKS": str(home / "tasks")},
        check=True,
        timeout=60,
    )


def test_a_function_consumes(daemon: Daemon, tmp_path: Path) -> None:
    """What it takes is acknowledged and has a line of its own, although four threads write; what it refuses is a dead
    letter after one attempt; SIGTERM ends it in order.
    """
    orders = [f"order {number}" for number in range(7, 407)]
    with WireClient(daemon.address, "sender") as client:
        client.send(*(a_message("orders", f"many {order}", order.encode()) for order in orders))
    spam = run_command("msg", "send", "orders", "spam", "--address", daemon.address).stdout.strip()
    with Shop("consume.py", tmp_path, daemon, "python", str(EXAMPLES / "consume.py")) as shop:
        _until(lambda: {f"billed {order}" for order in orders} <= set(shop.said().splitlines()), shop)
        _until(lambda: spam in _dead(daemon), shop)
        assert shop.end() == 0
    (letter,) = [each for each in json.loads(_dead(daemon)) if each["message_id"] == spam]
    assert (letter["attempts"], letter["reason"]) == (1, "FORWARDED")


def _dead(daemon: Daemon) -> str:
    return run_command("dead", "ls", "billing", "-o", "json", "--address", daemon.address).stdout
