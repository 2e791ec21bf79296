"""Signature of the classic protocol: the fields ``AccessKey`` and ``Signature`` of a request."""

from __future__ import annotations

import hmac
from base64 import b64encode
from dataclasses import replace

from broker_adapter.remoting.protocol.frames import RemotingFrame

_ACCESS_KEY, _SIGNATURE = "AccessKey", "Signature"


def signed(frame: RemotingFrame, access_key: str, secret_key: str) -> RemotingFrame:
    """Return a signed request: HMAC-SHA1 over the values of its fields, ordered by name, and its body."""
    fields = {**frame.fields, _ACCESS_KEY: access_key}
    content = "".join(fields[name] for name in sorted(fields)).encode() + frame.body
    signature = b64encode(hmac.digest(secret_key.encode(), content, "sha1")).decode()
    return replace(frame, fields={**fields, _SIGNATURE: signature})
