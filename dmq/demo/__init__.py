"""``dmq demo``: a daemon is killed half-way through a run, and everything it accepted arrives all the same.

``plan``      what is sent when, and with which delay (pure)
``facts``     what the client processes tell, as lines of JSON
``verdict``   from those facts to the figures, and to the exit code (pure)
``clients``   the client processes: the only place that imports the official RocketMQ client
``children``  the processes: the daemon that is killed and started again, and the clients
``screen``    a live table on a terminal, a line now and then elsewhere
``behind``    the cluster behind the daemon, if there is one
``show``      the run
"""

from __future__ import annotations


def run(*, messages: int, seconds: float, keep_data: bool = False, kill: bool = True) -> int:
    """Show it; return 0, or 1 if anything was lost or early, or the run could not be finished."""
    from dmq.demo.show import show  # the client processes import this package too, and need none of it

    return show(messages=messages, seconds=seconds, keep_data=keep_data, kill=kill)
