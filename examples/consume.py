"""Consume a topic with a function: what it raises is tried again, what it refuses is a dead letter.

DMQ_ADDRESS=127.0.0.1:8081 python consume.py
"""

from __future__ import annotations

import logging

from dmq.integrations.consumer import consume, run
from retry import Permanent

log = logging.getLogger("billing")


@consume("orders", group="billing", parallelism=4)
def bill(message) -> None:
    """Return: acknowledged. Raise: it comes again, by the group's policy."""
    order = message.body.decode()
    if not order.startswith("order "):
        raise Permanent(f"this is no order: {order}")
    log.info("billed %s", order)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(bill)  # until SIGTERM or Ctrl-C; what is in hand is finished
