"""Process that verifies a new backup: ``python -m dmq.recovery.check.verify DIR`` exits with 0 if it is undamaged.

It ends with its parent, and when the other end of its stdin is closed.
"""

from __future__ import annotations

import os
import sys
from itertools import chain
from pathlib import Path

from dmq.errors import DmqError
from dmq.recovery.backups import DAMAGED
from dmq.recovery.check.check import check_store
from dmq.runtime.background import die_with_parent, end_with_stdin

_FAILED = 1


def main(path: Path) -> int:
    """Check a backup at the lowest priority, write the findings to stderr, and return the exit code."""
    os.nice(19)
    try:
        findings = check_store(path, lambda _: None).findings
    except DmqError as error:
        sys.stderr.write(f"{error}\n")
        return _FAILED
    if not findings.count:
        return 0
    first = "; ".join(chain.from_iterable(findings.first.values()))
    sys.stderr.write(f"{findings.count.total():,} findings: {first}\n")
    return DAMAGED


if __name__ == "__main__":
    end_with_stdin()
    die_with_parent()
    sys.exit(main(Path(sys.argv[1])))
