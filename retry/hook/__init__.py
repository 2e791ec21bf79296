"""Producer hook: keeps a failed send in a ``DelaySink`` and repeats it until it succeeds or is dead.

``redelivery``   the facade: ``Redelivery``, with ``send`` and ``close``
``sender``       one send: attempt, keep, or reject
``drain``        threads that repeat waiting messages; ``attempts`` is one repetition, ``settle`` reports to the sink
``destination``  whether an attempt may be made now: ``breaker``, ``outage`` and ``ramp`` under one lock
``handlers``     functions that send one type; ``classify`` and ``verdict`` give the meaning of their errors
``durable``      one line around a producer; ``codecs`` turns its arguments into bytes and back
                 ``rocketmq`` for the official client, ``broker_producers`` for those of ``broker_adapter``
``process``      forks, signals and the end of the process
``metrics``, ``health``, ``logs``, ``uid``

Nothing here imports a client library, RocksDB or gRPC.
"""

from __future__ import annotations
