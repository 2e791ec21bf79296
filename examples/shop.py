"""The part that four applications share: what sends their orders, and a hook that keeps what it cannot send.

Imported by flask_shop.py, fastapi_shop.py, django_shop.py and celery_shop.py. Run as it is, it sends one order:

    DMQ_SPOOL=/var/lib/shop/spool SHOP_BROKER=127.0.0.1:8081 python shop.py

Nothing is opened when this module is imported, so a server may import it before it forks its workers.
"""

from __future__ import annotations

import os
from functools import cache

from rocketmq import ClientConfiguration, Credentials, Message, Producer

from dmq.integrations.worker_hook import WorkerHook
from retry import Delivered, Spooled

hook = WorkerHook()  # the environment says where it keeps messages: DMQ_SPOOL, DMQ_HOOK_...


@cache
def producer() -> Producer:
    """Return this process's producer, made at the first message."""
    made = Producer(ClientConfiguration(os.environ["SHOP_BROKER"], Credentials()), ["orders"])
    made.startup()
    return made


@hook.handler("order-created")
def send_order(payload: bytes) -> None:
    """Return: sent. Raise: not sent."""
    message = Message()
    message.topic = "orders"
    message.body = payload
    producer().send(message)


def answer_for(outcome: object) -> tuple[int, str]:
    """Return the status and the text of a web answer."""
    match outcome:
        case Delivered():
            return 201, "sent"
        case Spooled():
            return 202, "kept"
    return 503, "neither sent nor kept: try again"


if __name__ == "__main__":
    print(answer_for(hook.send("order-created", b"order 1"))[1])
    hook.close()
    producer().shutdown()
