"""The producer hook: a send that fails is kept in a ``DelaySink`` and repeated, until it succeeds or is dead.

``redelivery``   the facade: ``Redelivery``, with ``send`` and ``close``
``sender``       one send: attempt, keep, or reject
``drain``        the threads that repeat what waits; ``attempts`` is one repetition, ``settle`` tells the sink
``destination``  whether an attempt may be made now: ``breaker``, ``outage`` and ``ramp`` behind one lock
``handlers``     what sends a type; ``classify`` and ``verdict`` say what its errors mean
``durable``      one line around a producer; ``codecs`` turns its arguments into bytes and back
                 ``rocketmq`` the official client's, ``broker_producers`` our own producers'
``process``      forks, signals and the end of the process
``metrics``, ``health``, ``logs``, ``uid``

Nothing here imports a client library, RocksDB or gRPC.
"""

from __future__ import annotations
