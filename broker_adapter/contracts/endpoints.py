"""Parser of addresses in configuration and URLs."""

from __future__ import annotations

PORT_MAX = 65_535


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return the addresses in ``host:port;host:port``; a comma also separates. ``ValueError`` with the reason."""
    addresses = [each.strip() for each in text.replace(",", ";").split(";") if each.strip()]
    if not addresses:
        raise ValueError(f"no address in {text!r}; expected host:port, separated by semicolons")
    for address in addresses:
        host, _, port = address.rpartition(":")
        is_bare_v6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if not host or is_bare_v6 or "/" in host or not port.isascii() or not port.isdigit():
            raise ValueError(
                f"{address!r} is not an address; expected host:port, or [host]:port for IPv6, without a scheme"
            )
        if not 0 < int(port) <= PORT_MAX:
            raise ValueError(f"{address!r} has no port from 1 to {PORT_MAX}")
    return tuple(dict.fromkeys(addresses))
