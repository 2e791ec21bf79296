"""The front processes of a daemon: which they are, and a daemon whose fronts are not what they should be.

``python fronts.py SETTINGS python -m dmq serve ...`` stands in front of a daemon's command line as ``strace`` would.
``SETTINGS`` is JSON: ``patience`` (fields of ``Patience``), ``version`` (the daemon's own, as it believes) and
``executable`` (what it takes for Python when it starts a front).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from support.rigs.daemon.process import Daemon

PATIENCE_S = 30.0
TWO_FRONTS = {"DMQ_PROCESSES": "2"}


def with_fronts() -> dict[str, str]:
    """The environment of a daemon with two fronts."""
    return {**os.environ, **TWO_FRONTS}


def bent(**settings: Any) -> list[str]:  # noqa: ANN401 - as they are in JSON
    """What to put before the command line of a daemon whose fronts are to be like that."""
    return [sys.executable, __file__, json.dumps(settings)]


def serving(daemon: Daemon) -> list[psutil.Process]:
    """The fronts that take connections, as the daemon said, and that were not killed since."""
    ready = {each["pid"] for each in daemon.events("front_serving")}
    return [each for each in daemon.fronts if each.pid in ready]


def until(what: str, holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for something that tells nobody."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {within_s} s"
        time.sleep(0.02)


def until_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until processes have ended."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _bend(settings: dict[str, Any]) -> None:
    from dmq.processes.fronts import PATIENCE, Fronts

    run = importlib.import_module("dmq.daemon.run")  # the package has a function of that name
    defaults = Fronts.__init__.__kwdefaults__
    assert defaults is not None
    defaults["patience"] = PATIENCE._replace(**settings.get("patience", {}))
    if "version" in settings:
        vars(run)["version_here"] = lambda: str(settings["version"])
    sys.executable = settings.get("executable", sys.executable)


if __name__ == "__main__":
    _bend(json.loads(sys.argv[1]))
    sys.argv = ["dmq", *sys.argv[sys.argv.index("serve") :]]
    from dmq.cli import main

    sys.exit(main())
