"""In which form ``dmq/http2`` runs in this process and in those that it starts: compiled, or as Python.

One worker of two runs it as Python, and the other as it was compiled, if it was. So either form sees all tests in some
runs; its own tests see both in each (``tests/dmq/runtime/test_compiled.py``).
"""

from __future__ import annotations

import os

import pytest
from support.effort import COMPILED
from support.parallel import worker

NAME = "DMQ_COMPILED"


def choose() -> None:
    """Choose for this process, before it imports the package."""
    if COMPILED == "0" or (not COMPILED and worker() % 2):
        os.environ[NAME] = "0"
    else:
        os.environ.pop(NAME, None)


def needs_python() -> None:
    """Skip a test that changes what runs if that is compiled here."""
    import dmq.http2  # not before the choice

    if dmq.http2.is_compiled:
        pytest.skip("it changes code that is compiled here; test_compiled.py runs it as Python")
