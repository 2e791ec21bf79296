"""The operators' door: ``rockdmq.admin.v1``, on the same port as the public protocol.

``service``    one method per RPC, between what follows and the wire; sees no grpc object
``cell``, ``topics``, ``groups``, ``letters``, ``messages``
               what operators look at, read from the store and the broker, and change there
``clock``, ``backups``, ``quotas``, ``objects``, ``listing``, ``clients``
               the other calls
``status``     values that answers are made of
``validate``   what may be asked for
``mapping``    between the values of ``status`` and the wire, for both ends
``server``     the transport, for grpcio
``client``     what the command line calls with
``admin_v1``   the wire classes, in the private pool
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("AdminClient, and what it asks,", "client", "grpc", "google.protobuf")
