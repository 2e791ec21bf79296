"""Connections of our clients find a daemon again soon, however long it was away."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from dmq.admin.client.client import AdminClient, DaemonUnavailable

# gRPC's own pauses between attempts begin with 1 s and end with two minutes: this many would take 27 s.
ATTEMPTS = 7
WITHIN_S = 20.0


def test_a_connection_that_fails_is_tried_again_soon_every_time() -> None:
    """A host that hangs up on each connection sees the next one within a second."""
    seen = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    seen.release()

        threading.Thread(target=hang_up, daemon=True).start()
        client = AdminClient(f"127.0.0.1:{listener.getsockname()[1]}")
        until_s = time.monotonic() + WITHIN_S
        for number in range(ATTEMPTS):
            while not seen.acquire(timeout=0.05):
                assert time.monotonic() < until_s, f"{number} attempts in {WITHIN_S} s"
                with suppress(DaemonUnavailable):
                    client.status()
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
