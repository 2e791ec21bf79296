"""``rockdmq.consumer.v1`` as protobuf classes of our private pool; names are those of generated code.

Types are in ``consumer_v1.pyi``, which ``tools/generate_wire.py`` writes together with ``consumer_v1.desc`` from
``consumer_v1.proto``.
"""

from __future__ import annotations

from broker_adapter.wire.pool import load

globals().update(load("consumer_v1.desc"))
