"""The standard health service for either transport. At shutdown its watches send NOT_SERVING and end by themselves.

The service ``liveness`` is always SERVING: a liveness probe must not end a process that waits for its disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from grpc_health.v1 import health_pb2

LIVENESS: Final = "liveness"
_Request = health_pb2.HealthCheckRequest
_Response = health_pb2.HealthCheckResponse


class UnknownService(Exception):
    """The requested service is not served here."""


class HealthService:
    """The health state of the services in ``names``; all of them serve, or none, except ``liveness``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset((LIVENESS, *names))
        self._is_serving = False
        self._changed = asyncio.Event()
        self._is_ending = False

    def set(self, *, is_serving: bool, is_ending: bool = False) -> None:
        """Set the state of every service; with ``is_ending`` watches end after they have sent it."""
        self._is_serving = is_serving
        self._is_ending = is_ending
        self._changed.set()
        self._changed = asyncio.Event()

    def check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Return the current state. Raises UnknownService."""
        if request.service not in self._names:
            raise UnknownService(request.service)
        return self._answer(request.service)

    async def watch(
        self, request: health_pb2.HealthCheckRequest
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yield the current state, then every change."""
        said = None
        while True:
            changed, is_ending = self._changed, self._is_ending
            answer = self._answer(request.service)
            if answer != said:
                yield answer
                said = answer
            if is_ending:
                return
            await changed.wait()

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._names:
            return _Response(status=_Response.SERVICE_UNKNOWN)
        is_serving = self._is_serving or service == LIVENESS
        return _Response(status=_Response.SERVING if is_serving else _Response.NOT_SERVING)
