"""Processes that take what nobody else wants of the processors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dmq.runtime.background import background

MODULE = """
import os, sys
print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE, sys.argv[1:], __name__)
"""


def test_a_module_runs_as_by_itself_and_gives_way_to_everybody(tmp_path: Path) -> None:
    """With its arguments, under its own name."""
    (tmp_path / "probe.py").write_text(MODULE, encoding="utf-8")
    ended = subprocess.run(
        background("probe", tmp_path, 7),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"19 True ['{tmp_path}', '7'] __main__\n"
