"""Load for trails: delayed messages of one topic, sent by several clients and all consumed by one."""

from __future__ import annotations

import random
import threading
import time

from support.clients.load.crash import GROUP, TOPIC
from support.clients.wire.client import WireClient, a_message
from support.effort import SEED

_PER_CALL = 32


def send_delayed(address: str, count: int) -> None:
    """Send messages that are due one to three seconds later."""
    rng = random.Random(SEED)

    def send(sender: int, senders: int) -> None:
        with WireClient(address, f"sender-{sender}") as client:
            for first in range(sender * _PER_CALL, count, senders * _PER_CALL):
                now_ms = time.time_ns() // 1_000_000
                numbers = range(first, min(first + _PER_CALL, count))
                client.send(
                    *(
                        a_message(TOPIC, f"01{number:032X}", b"x", deliver_at_ms=now_ms + rng.randint(1_000, 3_000))
                        for number in numbers
                    )
                )

    threads = [threading.Thread(target=send, args=(number, 3)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def consume(address: str, count: int) -> None:
    """Receive and acknowledge until ``count`` are done."""
    until_s = time.monotonic() + 90
    done = 0
    with WireClient(address, "receiver") as client:
        while done < count:
            assert time.monotonic() < until_s, f"{done} of {count} arrived"
            found = client.receive(TOPIC, GROUP, batch=_PER_CALL, wait_s=1)
            if found:
                client.ack(TOPIC, GROUP, found)
            done += len(found)
