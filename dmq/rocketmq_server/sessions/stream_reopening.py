"""How a Python producer is brought to open its telemetry stream again after a restart of the daemon.

The official Python client (5.1.2) finds out that its stream is gone when it repeats its settings, every 5 minutes; the
one it then opens stays mute for another 5. Until it has told its settings nobody can ask it about its half messages.
But it opens a stream at once, settings first, to each address of a route that is new to it, and it asks for its routes
every 30 s. So a producer that is alive and has no stream is told the same address in another spelling.
"""

from __future__ import annotations

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.sessions import Session

# A producer of several topics asks for all their routes at once, and the stream takes a moment to come.
RESPELL_S_MIN = 20.0


def route_endpoints(session: Session | None, endpoints: wire.Endpoints, now_s: float) -> wire.Endpoints:
    """Return ``endpoints`` as a route is to name them to the client of ``session``.

    The spelling changes only while a Python producer has no stream, and then stays: each change makes it connect anew.
    """
    if session is None:
        return endpoints
    is_cut_off = session.outbox is None and session.client_type == wire.PRODUCER and session.language == "PYTHON"
    if is_cut_off and now_s - session.respelt_s >= RESPELL_S_MIN:
        session.is_respelt = not session.is_respelt
        session.respelt_s = now_s
    return other_spelling(endpoints) if session.is_respelt else endpoints


def other_spelling(endpoints: wire.Endpoints) -> wire.Endpoints:
    """Return one address under another name: an IPv4 address as a domain name, a domain name in capitals.

    Others come back as they are: clients take several addresses or an IPv6 address in one form only.
    """
    if len(endpoints.addresses) != 1 or endpoints.scheme not in {wire.IPv4, wire.DOMAIN_NAME}:
        return endpoints
    address = endpoints.addresses[0]
    host = address.host if endpoints.scheme == wire.IPv4 else address.host.upper()
    return wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host=host, port=address.port)])
