"""The public protocol of Apache RocketMQ 5 as protobuf classes of our private pool.

The names are those of generated code: ``Message``, ``Code.OK``, ``OK``, ``Code.Name(20000)``, and also ``Timestamp``,
``Duration``, ``SERVICE`` and ``METHODS``. ``tools/generate_wire.py`` writes ``rocketmq_v2.pyi`` (types) and
``rocketmq_v2.desc`` from ``rocketmq_v2.proto``.
"""

from __future__ import annotations

from broker_adapter.wire.pool import load

globals().update(load("rocketmq_v2.desc"))
