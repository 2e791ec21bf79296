"""``dmq demo``: kill a daemon during a run, and show that every accepted message is delivered nevertheless.

``program``      the run: a daemon, its kill and its restart, the clients, the result
``clients``      the client process: the only module that imports the official RocketMQ client
``plan``         messages of a run, with their send times and delays (pure)
``second_copy``  the place of the second copy for a takeover by a standby
``verdict``      figures, exit code and result lines, computed from the reports of the clients (pure)
"""

from __future__ import annotations


def run(*, messages: int, seconds: float, keep_data: bool = False, kill: bool = True, failover: bool = False) -> int:
    """Run the demo. Return 0, or 1 if a message was lost or early, or if the run could not be finished.

    With ``failover`` the data of the killed daemon is deleted, and a standby takes over.
    """
    from dmq.demo.program import run_demo  # the client process imports this package too and does not need it

    return run_demo(messages=messages, seconds=seconds, keep_data=keep_data, kill=kill, failover=failover)
