"""A producer whose broker is away: what it could not send waits on disk, and is sent once the broker is back.

    python hook.py

Needs no daemon: the broker is a list, and a switch.
"""

from __future__ import annotations

import tempfile
import threading

from dmq import Spool, Spooled
from retry import Redelivery

arrived: list[bytes] = []
broker_is_up = threading.Event()
has_arrived = threading.Event()


def main() -> None:
    """Send while the broker is away, then let it come back."""
    with tempfile.TemporaryDirectory() as folder:
        redelivery = Redelivery(Spool(folder))

        @redelivery.handler("order-created")
        def send(payload: bytes) -> None:
            """Return: sent. Raise: not sent."""
            if not broker_is_up.is_set():
                raise ConnectionError("the broker is away")
            arrived.append(payload)
            has_arrived.set()

        outcome = redelivery.send("order-created", b"order 1")
        assert isinstance(outcome, Spooled)  # on disk, synced: this process may die now
        print("spooled, because", outcome.reason)

        broker_is_up.set()
        has_arrived.wait(60)
        print("arrived", arrived)
        redelivery.close()


if __name__ == "__main__":
    main()
