"""A file of access keys for a daemon of a test, and keys that programs of any language can be given.

with Daemon(data, "--acl", str(write_acl(tmp_path))) as daemon:
    client.start("p", "producer", "orders", **SHOP.credentials)
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.wire.signature import Signer


class Key(NamedTuple):
    """An access key of the file below."""

    access_key: str
    secret_key: str

    @property
    def credentials(self) -> dict[str, str]:
        """What the programs under ``tests/clients`` take at ``start``."""
        return self._asdict()

    def signer(self, clock: Clock | None = None) -> Signer:
        """Signs as this key."""
        return Signer(self.access_key, self.secret_key, clock or SystemClock())


SHOP = Key("shop", "shop-secret-3f9c")  # sends to and consumes topics orders*, as groups billing*
READER = Key("reader", "reader-secret-77aa")  # consumes topics orders*, as groups reading*
HOOK = Key("hook", "hook-secret-91be")  # what `SidecarClient` takes, and no more
OPERATOR = Key("operator", "operator-secret-c041")  # may do everything
KEYS = (SHOP, READER, HOOK, OPERATOR)

ACL = f"""
[keys.{SHOP.access_key}]
secret = "{SHOP.secret_key}"
topics = {{ "orders*" = "PUB|SUB" }}
groups = {{ "billing*" = "SUB" }}

[keys.{READER.access_key}]
secret = "{READER.secret_key}"
topics = {{ "orders*" = "SUB" }}
groups = {{ "reading*" = "SUB" }}

[keys.{HOOK.access_key}]
secret = "{HOOK.secret_key}"
topics = {{ "redelivery_*" = "PUB|SUB", "%DLQ%redelivery-notes" = "PUB" }}
groups = {{ "redelivery" = "SUB|ADMIN", "redelivery-notes" = "ADMIN" }}

[keys.{OPERATOR.access_key}]
secret = "{OPERATOR.secret_key}"
admin = true
"""


def write_acl(folder: Path, text: str = ACL) -> Path:
    """Write a file of access keys as an operator should: whole at once, and for its owner alone."""
    path, part = folder / "acl.toml", folder / "acl.toml.part"
    part.touch(mode=0o600)
    part.write_text(text, encoding="utf-8")
    return part.replace(path)
