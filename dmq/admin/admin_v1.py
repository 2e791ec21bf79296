"""``rockdmq.admin.v1`` as protobuf classes of the private pool; names are those of generated code.

Types are in ``admin_v1.pyi``, which ``tools/generate_wire.py`` writes together with ``admin_v1.desc`` from
``admin_v1.proto``. ``AdminCalls`` has a method for each RPC, with the fields of the request as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from google.protobuf.message import Message

from broker_adapter.wire.pool import Method, load, option

_NAMESPACE: Any = load("admin_v1.desc", "dmq.admin")
globals().update(_NAMESPACE)


class AdminCalls:
    """Methods of a client, which makes each call by ``_call``. A call also takes its request instead of its fields."""

    _call: Callable[[Method, Message], Any]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _methods():
            raise AttributeError(f"the client has no call {name!r}", name=name, obj=self)
        return partial(self._made, _methods()[name])

    def _made(self, method: Method, *values: object, **fields: object) -> object:
        request, response_fields = method.request_class, method.response_class.DESCRIPTOR.fields
        if values and isinstance(values[0], request):
            made = values[0]
        else:
            names = [field.name for field in request.DESCRIPTOR.fields][: len(values)]
            made = request(**dict(zip(names, values, strict=True)), **fields)
        response = self._call(method, made)
        return getattr(response, response_fields[0].name) if len(response_fields) == 1 else response


@cache
def _methods() -> Mapping[str, Method]:
    known: Mapping[str, Method] = _NAMESPACE["METHODS"]
    return {option(each, _NAMESPACE["client_name"]) or each.snake_name: each for each in known.values()}
