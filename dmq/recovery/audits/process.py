"""Process of an audit: ``spark_audit`` at the lowest priority.

    python -m dmq.runtime.background dmq.recovery.audits.process PARENT_PID ARGUMENT...

It is killed with the daemon. If memory runs out, the system kills it first, and not the daemon.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from dmq.runtime.background import die_with_parent

_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
_FIRST: Final = "1000"


def main(arguments: list[str]) -> None:
    """Become an audit."""
    die_with_parent(int(arguments[0]))
    with suppress(OSError):  # a sandbox may not allow it, and other systems do not have it
        _OOM_SCORE.write_text(_FIRST, encoding="ascii")
    sys.argv[1:] = arguments[1:]
    runpy.run_module("spark_audit", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
