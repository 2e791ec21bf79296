"""``dmq demo``: kill a daemon during a run, and show that every accepted message is delivered nevertheless.

``plan``      messages of a run, with their send times and delays (pure)
``facts``     reports of the client processes, as lines of JSON
``ledger``    facts of a run so far
``verdict``   figures and exit code, computed from these facts (pure)
``clients``   the client processes: the only module that imports the official RocketMQ client
``children``  the processes: the daemon that is killed and started again, and the clients
``screen``    a live table on a terminal, progress lines elsewhere
``behind``    the cluster that the daemon forwards to, if there is one
``result``    the last lines (pure)
``show``      the run
"""

from __future__ import annotations


def run(*, messages: int, seconds: float, keep_data: bool = False, kill: bool = True) -> int:
    """Run the demo. Return 0, or 1 if a message was lost or early, or if the run could not be finished."""
    from dmq.demo.show import show  # the client processes import this package too and do not need it

    return show(messages=messages, seconds=seconds, keep_data=keep_data, kill=kill)
