"""Addresses of proxies, and names that say which proxy gave them."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from broker_adapter.contracts.endpoints import PORT_MAX, parse_endpoints
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire

_LENGTH_DIGITS_MAX = 4


def address_of(endpoints: wire.Endpoints) -> str:
    """Return where to dial what a route names; empty if it names nothing that can be dialled."""
    for each in endpoints.addresses:
        if each.host and 0 < each.port <= PORT_MAX:
            return f"[{each.host}]:{each.port}" if ":" in each.host else f"{each.host}:{each.port}"
    return ""


def endpoints_of(address: str) -> wire.Endpoints:
    """Return an address as the protocol writes it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        scheme = wire.IPv6 if ipaddress.ip_address(host).version == 6 else wire.IPv4
    except ValueError:
        scheme = wire.DOMAIN_NAME
    return wire.Endpoints(scheme=scheme, addresses=[wire.Address(host=host, port=int(port))])


class Name(NamedTuple):
    """What a proxy gave out for a message, and to whom: only that one is sure to know it. As text it is a handle."""

    address: str  # of the proxy
    client_id: str
    message_id: str
    given: str  # a receipt handle, a recall handle, a transaction id

    def __str__(self) -> str:
        return (
            f"{self.address} {len(self.client_id)} {len(self.message_id)} {self.client_id}{self.message_id}{self.given}"
        )

    @classmethod
    def of(cls, handle: str, rule: Rule) -> Name:
        """Undo ``str``; ``Refused(rule)`` for what is no handle of ours."""
        try:
            address, client_chars, id_chars, rest = handle.split(" ", 3)
            (checked,) = parse_endpoints(address)
            ends = _length(client_chars), _length(client_chars) + _length(id_chars)
        except ValueError:
            raise Refused(rule, "this adapter never gave it", value=handle) from None
        if checked != address or ends[1] >= len(rest):
            raise Refused(rule, "this adapter never gave it", value=handle)
        return cls(address, rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :])


def _length(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX:
        raise ValueError(digits)
    return int(digits)
