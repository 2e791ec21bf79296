"""The process of a daemon: what it is told before it serves, and the one line with which it ends."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog
import uvloop

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.extras import ExtraMissing
from dmq.config.settings import DaemonConfig
from dmq.daemon.checks import refuse_start
from dmq.daemon.run import EXIT_FAILED, serve
from dmq.errors import DmqError, with_advice
from dmq.processes.tuning import tune
from dmq.runtime.log import configure, is_for_people
from dmq.version import version_here

SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger("dmq.daemon")


def run(config: DaemonConfig) -> int:
    """Serve until SIGTERM, SIGINT or a storage failure; return the exit code.

    What keeps a daemon from starting, or ends it, is one line of the log, with what to do about it.
    """
    # What lies outside of directories that are closed anyway is the trail, if a group is to read it.
    os.umask(0o027 if config.trail_mode == "group" else 0o077)
    clock = SystemClock()
    configure(config.log_level, config.log_format, clock)
    settings = config.shown(changed_only=is_for_people(config.log_format, sys.stderr))
    log.info("starting", version=version_here(), pid=os.getpid(), **settings)
    tune()
    # A delivery goes through two threads beside a loop that computes all the time when clients send all they can. Each
    # step waits for the interpreter: with Python's 5 ms deliveries were 25 ms late in the middle, with this 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        refuse_start(config, clock)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config, clock))
    except (DmqError, ExtraMissing, OSError) as error:
        log.critical("not_served", error=with_advice(error), code=EXIT_FAILED)
    except Exception as error:
        log.critical("crashed", error=f"unexpected {type(error).__name__}: {with_advice(error)}", exc_info=True)
    return EXIT_FAILED
