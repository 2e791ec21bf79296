"""A workaround that makes a Python producer reopen its telemetry stream after a restart of the daemon.

The official Python client (5.1.2) detects the loss of its stream when it repeats its settings, every 5 minutes. The
stream that it then opens sends no settings for another 5 minutes. Until then the server cannot send it transaction
checks. But the client opens a stream at once, settings first, to each address in a route that is new to it. It requests
its routes every 30 s. So the route of a live producer without a stream names the same address in another spelling.
"""

from __future__ import annotations

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.sessions import ClientSession

# A producer of several topics requests all their routes at once, before its new stream is open.
RESPELL_S_MIN = 20.0


def route_endpoints(session: ClientSession | None, endpoints: wire.Endpoints, now_s: float) -> wire.Endpoints:
    """Return ``endpoints`` in the spelling for a route of the client of ``session``.

    The spelling changes only while a Python producer has no stream, and is then kept, because each change makes the
    client reconnect.
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

    Other endpoints are returned unchanged: clients accept several addresses or an IPv6 address in one form only.
    """
    if len(endpoints.addresses) != 1 or endpoints.scheme not in {wire.IPv4, wire.DOMAIN_NAME}:
        return endpoints
    address = endpoints.addresses[0]
    host = address.host if endpoints.scheme == wire.IPv4 else address.host.upper()
    return wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host=host, port=address.port)])
