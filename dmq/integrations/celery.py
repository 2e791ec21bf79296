"""The hook in Celery workers: ``connect(hook)`` next to the tasks."""

from __future__ import annotations

from celery.concurrency.prefork import TaskPool
from celery.signals import worker_process_init, worker_process_shutdown, worker_ready, worker_shutdown

from dmq.integrations.worker_hook import WorkerHook


def connect(hook: WorkerHook) -> None:
    """Start the hook in each process that runs tasks, and close it when the worker ends.

    In a prefork pool these are the children, in every other pool the worker itself.
    """

    def start_unless_prefork(sender: object = None, **_: object) -> None:
        if not isinstance(getattr(sender, "pool", None), TaskPool):
            hook.begin()

    def close(**_: object) -> None:
        hook.close()

    name = f"dmq-hook-{id(hook)}"
    worker_process_init.connect(hook.begin, weak=False, dispatch_uid=name)
    worker_ready.connect(start_unless_prefork, weak=False, dispatch_uid=name)
    for ending in (worker_process_shutdown, worker_shutdown):
        ending.connect(close, weak=False, dispatch_uid=name)
