"""Process of a daemon: the settings that it applies before it serves, and the final log line."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

import structlog
import uvloop

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.extras import ExtraMissing
from dmq.config.settings import DaemonConfig
from dmq.daemon.checks import refuse_start
from dmq.daemon.run import EXIT_FAILED, exit_code_of, serve
from dmq.errors import DmqError, with_advice
from dmq.processes.tuning import tune
from dmq.runtime.log import configure, is_for_people
from dmq.version import version_here

SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger("dmq.daemon")


def run(config: DaemonConfig, sources: Mapping[str, str]) -> int:
    """Serve until SIGTERM, SIGINT or a storage failure; return the exit code.

    ``sources`` are those of the settings, by key. A fault that prevents or ends the service is one log line, with the
    remedy.
    """
    # Only the trail, if a group may read it, is outside of directories with restricted permissions.
    os.umask(0o027 if config.trail_mode == "group" else 0o077)
    clock = SystemClock()
    configure(config.log_level, config.log_format, clock)
    settings = config.shown(changed_only=is_for_people(config.log_format, sys.stderr))
    log.info("starting", version=version_here(), pid=os.getpid(), **settings)
    tune()
    # A delivery passes through two threads next to a loop that is busy when clients send at full rate. Each step waits
    # for the interpreter: the median lateness of deliveries was 25 ms with Python's 5 ms, and is 5 ms with this value.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        refuse_start(config, clock)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config, clock, sources))
    except (DmqError, ExtraMissing, OSError) as error:
        code = exit_code_of(error)
        log.critical("start_failed", error=with_advice(error), code=code)
        return code
    except Exception as error:
        log.critical("crashed", error=f"unexpected {type(error).__name__}: {with_advice(error)}", exc_info=True)
    return EXIT_FAILED
