"""``rockdmq.admin.v1`` as protobuf classes of the private pool; names are those of generated code.

Types are in ``admin_v1.pyi``, which ``tools/generate_wire.py`` writes together with ``admin_v1.desc`` from
``admin_v1.proto``.
"""

from __future__ import annotations

from broker_adapter.wire.pool import load

globals().update(load("admin_v1.desc", "dmq.admin"))
