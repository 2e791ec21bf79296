"""``durable`` for a producer with a spool directory: one line, one argument."""

from __future__ import annotations

import os
from typing import Any

from dmq.producer_store.spool import Spool
from retry import Redelivery
from retry import durable as _durable
from retry.sink import DelaySink

SPOOL_DEFAULT = "var/spool"


def durable(
    producer: Any,  # noqa: ANN401 - any producer
    sink: DelaySink | Redelivery | str | os.PathLike[str] = SPOOL_DEFAULT,
    **options: Any,  # noqa: ANN401 - options of ``retry.durable``
) -> Any:  # noqa: ANN401 - proxy of the producer
    """Do the same as ``retry.durable``; a path is the root of a ``Spool``, closed with the hook."""
    if not isinstance(sink, str | os.PathLike):
        return _durable(producer, sink, **options)
    spool = Spool(sink)
    try:
        return _durable(producer, spool, **options)
    except BaseException:
        spool.close()
        raise
