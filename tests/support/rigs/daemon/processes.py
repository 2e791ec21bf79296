"""How many processes a daemon of a test has: what the test says, else what the run says, else drawn.

One daemon in sixteen has two fronts, and a daemon that starts again may have another number than before. What is drawn
follows from ``DMQ_TEST_SEED``, the test, and how often that test drew before.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from typing import Final

from support.effort import PROCESSES, SEED

NAME: Final = "DMQ_PROCESSES"  # the daemon's
_ONE_IN: Final = 16
_drawn: Counter[str] = Counter()


def said_for_all() -> bool:
    """Say whether the run says how many all daemons have."""
    return bool(PROCESSES)


def processes_of(env: Mapping[str, str], said: int | None = None) -> int:
    """Return how many processes the daemon that starts now in ``env`` is to have."""
    if NAME in env:
        return int(env[NAME])
    if said is not None or env.get("DMQ_TRANSPORT") == "grpcio":  # which has no fronts
        return said or 1
    if PROCESSES:
        return int(PROCESSES)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    _drawn[test] += 1
    return 1 if random.Random(f"{SEED} {test} {_drawn[test]}").randrange(_ONE_IN) else 2
