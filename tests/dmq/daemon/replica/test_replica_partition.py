"""A primary in a network namespace that loses the object store, its standby and its clients at once."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.effort import EFFORT
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.faults.network_namespace import NetworkNamespace, network_namespace
from support.rigs.services.object_server import S3Server

pytestmark = pytest.mark.fault
ROUNDS = EFFORT


def create_topic(namespace: NetworkNamespace, daemon: Daemon, name: str) -> int:
    """Create a topic from within the namespace, and return the exit code."""
    command = (sys.executable, "-m", "dmq", "topic", "create", name, "--timeout", "5s", "--address", daemon.address)
    return subprocess.run((*namespace.prefix, *command), check=False, capture_output=True).returncode


@pytest.mark.timeout(120 + 120 * ROUNDS)
def test_a_partitioned_primary_answers_nothing(tmp_path: Path) -> None:
    """Cut off from the object store, the primary answers no write OK, before and after its successor serves. It ends as
    fenced, and everything that it answered OK is at the successor.
    """
    with ExitStack() as stack:
        namespace = stack.enter_context(network_namespace())
        server = S3Server(tmp_path, namespace.host)
        stack.callback(server.kill)
        for number in range(ROUNDS):
            env = {**os.environ, **server.environment(), "DMQ_TRAIL": "off", "DMQ_REPLICA": "sync"}
            env |= {"DMQ_REPLICA_URL": f"s3://orders/store-{number}", "DMQ_REPLICA_LEASE": "3s"}
            data = tmp_path / f"data-{number}"
            data.mkdir()
            primary = stack.enter_context(Daemon(data / "primary", env=env, prefix=namespace.prefix, processes=1))
            assert create_topic(namespace, primary, "before") == 0
            standby = Daemon(data / "standby", env=env)
            stack.callback(standby.close)
            standby.spawn().wait_for("standby_started", timeout_s=60)
            primary.wait_for("standby_registered", timeout_s=60)
            assert create_topic(namespace, primary, "bound") == 0
            namespace.cut()
            assert create_topic(namespace, primary, "cut") != 0
            standby.wait_for("taken_over", timeout_s=60)
            standby.wait_until_serving()
            namespace.heal()
            assert primary.wait(60) == 8
            found = run_command("topic", "ls", "--json", "--address", standby.address).stdout
            assert [name in found for name in ("before", "bound")] == [True, True]
            standby.stop()
