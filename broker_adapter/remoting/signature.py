"""The signature of the classic protocol: ``AccessKey`` and ``Signature`` among the fields of a request."""

from __future__ import annotations

import hmac
from base64 import b64encode
from dataclasses import replace

from broker_adapter.remoting.frames import Frame

_ACCESS_KEY, _SIGNATURE = "AccessKey", "Signature"


def signed(frame: Frame, access_key: str, secret_key: str) -> Frame:
    """Return a request that says whose it is: HMAC-SHA1 over the values of its fields by name, and its body."""
    fields = {**frame.fields, _ACCESS_KEY: access_key}
    content = "".join(fields[name] for name in sorted(fields)).encode() + frame.body
    signature = b64encode(hmac.digest(secret_key.encode(), content, "sha1")).decode()
    return replace(frame, fields={**fields, _SIGNATURE: signature})
