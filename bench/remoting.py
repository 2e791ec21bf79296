"""What a bench and the tests ask of RocketMQ's own management, from code that has no event loop.

Apache's command-line tool does the same in five seconds a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from broker_adapter.remoting import RemotingAdmin, RemotingOptions

_TIMEOUT_MS = 10_000
_Found = TypeVar("_Found")


def administer(names: str, ask: Callable[[RemotingAdmin], Awaitable[_Found]]) -> _Found:
    """Return what ``ask`` finds at the cluster of a name server."""

    async def asked() -> _Found:
        async with RemotingAdmin(RemotingOptions(names=(names,), request_timeout_ms=_TIMEOUT_MS)) as admin:
            return await ask(admin)

    with ThreadPoolExecutor(1) as beside:  # whoever asks may have a loop that runs
        return beside.submit(asyncio.run, asked()).result()
