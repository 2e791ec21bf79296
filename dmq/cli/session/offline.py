"""Directories that a command opens itself, without a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker_adapter.runtime.extras import command
from dmq.cli.output.errors import CommandFailed, ExitCode


@contextmanager
def stopped(data: Path) -> Iterator[None]:
    """Like ``offline``, for the directory of a stopped process; the command ends if it contains no store."""
    if not any((data / name).exists() for name in ("CELL", "rocksdb")):
        raise CommandFailed(f"there is no store in {data}", ExitCode.NOT_FOUND)
    with offline():
        yield


@contextmanager
def offline() -> Iterator[None]:
    """Open stores in this context: their log lines are suppressed, and their errors end the command.

    Damage has the exit code 4, a directory in use or an unreachable object store 6.
    """
    import structlog

    from dmq.errors import ReplicaDamaged, StoreCorrupt, StoreLocked
    from dmq.replication.objects import ReplicaUnavailable

    was = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))  # no event of ours is critical
    try:
        yield
    except (StoreLocked, ReplicaUnavailable) as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
    except (StoreCorrupt, ReplicaDamaged) as error:
        raise CommandFailed(str(error), ExitCode.DAMAGED) from error
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is missing: {command('server')}") from error
    finally:
        structlog.configure(**was)
