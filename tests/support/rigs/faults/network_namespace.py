"""A network namespace with one link to this host, which can be cut: a partition that no process can notice."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

import pytest


class NetworkNamespace:
    """Namespace for ``prefix``; ``host`` is the address of this host in it, and ``address`` that of the namespace."""

    def __init__(self, name: str) -> None:
        self._name = name
        subnet = f"10.{200 + os.getpid() % 50}.{int(name[-2:], 16)}"
        self.host, self.address = f"{subnet}.1", f"{subnet}.2"
        self.prefix = ("ip", "netns", "exec", name)

    def open(self) -> None:
        """Create the namespace and its link."""
        outer, inner = f"{self._name}-o", f"{self._name}-i"
        _ip("netns", "add", self._name)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", self._name)
        _ip("address", "add", f"{self.host}/24", "dev", outer)
        _ip("link", "set", outer, "up")
        _ip("-n", self._name, "address", "add", f"{self.address}/24", "dev", inner)
        _ip("-n", self._name, "link", "set", "lo", "up")
        self.heal()

    def cut(self) -> None:
        """Lose all packets."""
        _ip("-n", self._name, "link", "set", f"{self._name}-i", "down")

    def heal(self) -> None:
        """Deliver packets again."""
        _ip("-n", self._name, "link", "set", f"{self._name}-i", "up")

    def close(self) -> None:
        """Remove the namespace, and the link with it."""
        subprocess.run(("ip", "netns", "delete", self._name), check=False)


@contextmanager
def network_namespace() -> Iterator[NetworkNamespace]:
    """Open a namespace, or skip the test where that is impossible."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    namespace = NetworkNamespace(f"dmq{token_hex(3)}")
    try:
        try:
            namespace.open()
        except subprocess.CalledProcessError as failed:
            pytest.skip(f"network namespaces are not available: {failed.stderr.decode().strip()}")
        yield namespace
    finally:
        namespace.close()


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
