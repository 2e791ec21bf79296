"""``make demo-rocketmq``, only shorter, on the cluster of the tests."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.effort import EFFORT, at_length
from support.rigs.rocketmq.cluster import cluster

from dmq.demo.program import DemoCluster, run_demo

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),  # the first one has Maven bring the cluster, and starts it
    pytest.mark.skipif(
        importlib.util.find_spec("rocketmq") is None, reason="the official Python client is not installed (extra: demo)"
    ),
]


@at_length  # tests/dmq/cluster/test_broker_on_rocketmq.py kills both as well
def test_a_killed_daemon_and_a_killed_broker_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every message is delivered, and none early. The broker is killed in a long run, else stopped for a while."""
    running = cluster().rocketmq
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dies, away = running.nodes[0], ExitStack()
    behind = DemoCluster(
        endpoints=running.endpoints,
        topic=cluster().topic(),
        group=cluster().group(),
        kill=lambda: away.enter_context(running.asleep(dies)) if EFFORT == 1 else running.kill(dies),
        start=lambda: away.close() if EFFORT == 1 else running.start(dies),
    )
    code = run_demo(messages=60, seconds=3, keep_data=False, kill=True, cluster=behind)
    said = capfd.readouterr().out
    assert code == 0, said
    figures = dict(re.findall(r"^(accepted|delivered|lost|early) +([0-9,]+)", said, re.MULTILINE))
    assert figures == {"accepted": "60", "delivered": "60", "lost": "0", "early": "0"}
    assert re.search(
        r"^kill +SIGKILL; down for [0-9.]+ s, .*\n +its broker was down for [0-9.]+ s$", said, re.MULTILINE
    )
    assert list(tmp_path.iterdir()) == [], "data is left behind"


def test_missing_input_is_reported(tmp_path: Path) -> None:
    """Without Java it ends at once, and says what it takes."""
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "bench.demo"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "which takes Java 17 or newer and Maven: java is not here" in ran.stdout
