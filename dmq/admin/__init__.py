"""The operators' door: ``rockdmq.admin.v1``, on the same port as the public protocol.

``source``     what the daemon answers with: a protocol and plain values
``service``    one method per RPC, between ``source`` and the wire; sees no grpc object
``validate``   what may be asked for
``mapping``    between the values of ``source`` and the wire, for both ends
``server``     the transport, for grpcio
``client``     what the command line calls with
``admin_v1``   the wire classes, in the private pool
"""

from __future__ import annotations
