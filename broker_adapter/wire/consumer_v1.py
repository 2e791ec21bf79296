"""``rockdmq.consumer.v1`` as protobuf classes of our private pool, with the names of generated code.

``tools/generate_wire.py`` writes ``consumer_v1.pyi`` (types) and ``consumer_v1.desc`` from ``consumer_v1.proto``.
"""

from __future__ import annotations

from broker_adapter.wire.pool import load

globals().update(load("consumer_v1.desc"))
