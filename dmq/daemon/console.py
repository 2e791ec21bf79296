"""Console next to the daemon: a process of its own, started again after each end."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

import structlog

from broker_adapter.runtime.extras import require
from dmq.config.settings import ENV_PREFIX
from dmq.config.units import Address

_RESTART_S_MIN: Final = 1.0
_RESTART_S_MAX: Final = 60.0  # of a console that never serves: its port is taken
_ERROR_BYTES_MAX: Final = 4096
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the keys are compared, not bound

log = structlog.get_logger("dmq.daemon")


def require_console() -> None:
    """Raise ``ExtraMissing`` if the console is not installed."""
    require("the console", "console", "starlette", "uvicorn", "jinja2")


async def keep_console(listen: Address, daemon: Address) -> None:
    """Run the console of the daemon at ``daemon``, and start it again after each end, until cancelled."""
    pause_s = _RESTART_S_MIN
    while True:
        has_served, reason = await _run(listen, Address(_ANY.get(daemon.host, daemon.host), daemon.port))
        log.warning("console_ended", reason=reason)
        pause_s = _RESTART_S_MIN if has_served else min(_RESTART_S_MAX, 2 * pause_s)
        await asyncio.sleep(pause_s)


async def _run(listen: Address, daemon: Address) -> tuple[bool, str]:
    """Run it once; return whether it served, and why it ended."""
    options = ("console", "--address", str(daemon), "--listen", str(listen), "--ends-with-stdin")
    # A context or certificates of this user are for other daemons.
    env = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    pipe = asyncio.subprocess.PIPE  # an end of this process, for any reason, closes the console's stdin
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dmq", *options), stdin=pipe, stdout=pipe, stderr=pipe, env=env
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(_tail(process.stderr))
    try:
        url = (await process.stdout.readline()).decode().removeprefix("console ").strip()
        if url:
            log.info("console_serving", url=url)
        reason = await errors
        return bool(url), f"exit code {await process.wait()}" + (f": {reason}" if reason else "")
    finally:
        errors.cancel()
        if process.returncode is None:
            process.kill()  # it has nothing to lose


async def _tail(errors: asyncio.StreamReader) -> str:
    """Return the last line, when the stream has ended."""
    kept = b""
    while part := await errors.read(_ERROR_BYTES_MAX):
        kept = (kept + part)[-_ERROR_BYTES_MAX:]
    lines = kept.decode(errors="replace").splitlines()
    return lines[-1] if lines else ""
