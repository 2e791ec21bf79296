"""The hook in FastAPI.

app = FastAPI(lifespan=lifespan(hook))
app.include_router(router(hook), prefix="/hook")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import APIRouter, FastAPI, Response

from dmq.integrations.worker_hook import JSON, PROMETHEUS, WorkerHook


def lifespan(hook: WorkerHook) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan that starts the hook before the first request and closes it after the last one.

    An application with its own lifespan calls ``hook.start()`` and ``await hook.close_async()`` there.
    """

    @asynccontextmanager
    async def alive(_: FastAPI) -> AsyncIterator[None]:
        hook.start()
        try:
            yield
        finally:
            await hook.close_async()

    return alive


def router(hook: WorkerHook) -> APIRouter:
    """Return the routes ``/metrics`` and ``/ready``, which are not in the OpenAPI schema."""
    made = APIRouter(include_in_schema=False)

    # Not coroutines: the sink may answer slowly, so FastAPI calls them in a thread.
    @made.get("/metrics")
    def metrics() -> Response:
        return Response(hook.render_prometheus(), headers={"Content-Type": PROMETHEUS})

    @made.get("/ready")
    def ready() -> Response:
        is_ready, text = hook.readiness()
        return Response(text, 200 if is_ready else 503, headers={"Content-Type": JSON})

    return made
