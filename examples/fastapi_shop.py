"""A shop in FastAPI that loses no order while its broker is away.

DMQ_SPOOL=/var/lib/shop/spool SHOP_BROKER=127.0.0.1:8081 uvicorn --workers 2 fastapi_shop:app
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from shop import answer_for, hook

from dmq.integrations.fastapi import lifespan, router

app = FastAPI(lifespan=lifespan(hook))
app.include_router(router(hook), prefix="/hook")  # /hook/metrics and /hook/ready


@app.post("/orders")
async def create(request: Request) -> Response:
    """Take an order."""
    status, text = answer_for(await hook.send_async("order-created", await request.body()))
    return Response(text, status)
