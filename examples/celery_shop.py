"""Tasks of Celery whose messages are not lost while their broker is away.

DMQ_SPOOL=/var/lib/shop/spool SHOP_BROKER=127.0.0.1:8081 celery --app celery_shop worker --concurrency 2

Celery's own broker is a folder here, named by SHOP_TASKS.
"""

from __future__ import annotations

import os

from celery import Celery
from shop import answer_for, hook

from dmq.integrations.celery import connect

TASKS = os.environ.get("SHOP_TASKS", "var/tasks")
app = Celery("shop", broker="filesystem://")
app.conf.broker_transport_options = {
    "data_folder_in": TASKS,
    "data_folder_out": TASKS,
    "control_folder": f"{TASKS}/control",
}
connect(hook)  # started in each process of the pool, closed when the worker ends


@app.task(name="create-order")
def create_order(body: str) -> str:
    """Take an order."""
    return answer_for(hook.send("order-created", body.encode()))[1]
