"""How long tests that could go on for ever go on: 1 by default, ``DMQ_TEST_EFFORT=20`` for a long run.

Read when ``tests/conftest.py`` is loaded, before it takes our variables out of the environment.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

EFFORT = max(1, int(os.environ.get("DMQ_TEST_EFFORT", "1")))
CRASHES = int(os.environ.get("DMQ_TEST_CRASHES", "10"))  # how often a test of the whole daemon kills it
SEED = int(os.environ.setdefault("DMQ_TEST_SEED", str(int.from_bytes(os.urandom(4)))))  # of all workers of a run
TLS = os.environ.get("DMQ_TEST_TLS", "")  # "on" or "off" for all official clients; else what each does by itself
if TLS not in {"", "on", "off"}:
    raise pytest.UsageError(f"DMQ_TEST_TLS is on or off, not {TLS!r}")
CLIENTS = os.environ.get("DMQ_TEST_CLIENTS", "newest")  # "all" published versions take the tests of official clients
if CLIENTS not in {"newest", "all"}:
    raise pytest.UsageError(f"DMQ_TEST_CLIENTS is newest or all, not {CLIENTS!r}")
PROCESSES = os.environ.get("DMQ_TEST_PROCESSES", "")  # of each daemon; drawn if it is not said
if PROCESSES and not PROCESSES.isdecimal():
    raise pytest.UsageError(f"DMQ_TEST_PROCESSES is a number of processes, not {PROCESSES!r}")
COMPILED = os.environ.get("DMQ_TEST_COMPILED", "")  # 1 or 0: see ``support.forms``
if COMPILED not in {"", "0", "1"}:
    raise pytest.UsageError(f"DMQ_TEST_COMPILED is 1 or 0, not {COMPILED!r}")
# For tests that take long and have a shorter one beside them.
at_length = pytest.mark.skipif(EFFORT < 2, reason="a long run: DMQ_TEST_EFFORT=2 or more")


def drawn(cases: Sequence[Case], count: int) -> list[Case]:
    """Return ``count`` of the cases, by the seed of the run, in their order; in a long run all of them.

    It is for cases that cost seconds each and test one rule: each run takes others.
    """
    places = range(len(cases))
    chosen = places if EFFORT > 1 else sorted(random.Random(SEED).sample(places, count))
    return [cases[place] for place in chosen]
