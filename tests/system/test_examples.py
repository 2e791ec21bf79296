"""The programs in ``examples`` run as they stand, and say what their readers expect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon, free_port

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that asks soon about transactions that nobody decides."""
    env = os.environ | {"DMQ_TRANSACTION_TIMEOUT": "1s", "DMQ_TRANSACTION_CHECK_INTERVAL": "1s"}
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", env=env) as daemon:
        yield daemon


def said_by(name: str, home: Path, *arguments: str) -> str:
    """Run an example to its end, and return what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*(("sh",) if name.endswith(".sh") else (sys.executable,)), str(EXAMPLES / name), *arguments],
        env=os.environ | {"DMQ_CONSOLE": "off", "HOME": str(home), "PATH": path},  # of the log of the client
        cwd=home,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    """And stands in their README, whose blocks ``test_pages.py`` runs."""
    names = {each.name for each in EXAMPLES.iterdir() if each.suffix in {".py", ".sh"}}
    here, page = (path.read_text(encoding="utf-8") for path in (Path(__file__), EXAMPLES / "README.md"))
    there = Path(__file__).with_name("test_integration_examples.py").read_text(encoding="utf-8")
    assert [
        name
        for name in names
        if f'said_by("{name}"' not in here and f'Shop("{name}"' not in there and f"python examples/{name}" not in page
    ] == []
    assert set(re.findall(r"\]\((\w+\.\w+)\)", page)) == names


def test_a_message_that_failed_is_printed_in_the_end(served: Daemon, tmp_path: Path) -> None:
    """Two attempts, a dead letter, and a redrive."""
    said = said_by("retries.py", tmp_path, served.address).splitlines()
    assert said[:2] == ["no paper for invoice 17, attempt 1", "no paper for invoice 17, attempt 2"]
    assert re.fullmatch(r"dead letter \w+", said[2])
    assert said[3:] == ["printed invoice 17, attempt 1"]


def test_steps_of_an_account_come_in_order(served: Daemon, tmp_path: Path) -> None:
    """Whatever those of the other one do."""
    said = said_by("fifo.py", tmp_path, served.address).splitlines()
    assert len(said) == 6
    for account in ("alice", "bob"):
        steps = [line.removeprefix(f"{account} ") for line in said if line.startswith(account)]
        assert steps == ["opened", "paid in", "closed"]


def test_files_of_the_database_are_shipped(served: Daemon, tmp_path: Path) -> None:
    """Also where the sender forgot to say so; what was rolled back is not."""
    said = said_by("transaction.py", tmp_path, served.address).splitlines()
    assert sorted(said) == ["asked about order 3", "shipped order 1", "shipped order 3"]


def test_messages_kept_by_the_hook_arrive(tmp_path: Path) -> None:
    """Once the broker is back."""
    said = said_by("hook.py", tmp_path).splitlines()
    assert said[0].startswith("spooled, because ")
    assert said[1] == "arrived [b'order 1']"


def test_a_killed_daemon_is_audited(tmp_path: Path) -> None:
    """Nothing is lost, says the job that knows nothing of the daemon."""
    said = said_by("audit.sh", tmp_path, f"127.0.0.1:{free_port()}")
    assert "clean" in said.lower()
