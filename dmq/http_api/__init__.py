"""HTTP API: the messages and objects of a daemon as JSON, for ``curl`` and programs without a client.

It runs in a process of its own, started by ``dmq serve`` or ``dmq http-api``. It sends by the public protocol and does
everything else by ``rockdmq.admin.v1``, with the access key of its caller and no other. It opens no store.

``app``         the application: limits, routing, errors
``routes``      one declaration per route: validation, call and OpenAPI document
``sending``     the route that sends messages
``schemas``     models of requests and schemas of answers, from the descriptors of ``rockdmq.admin.v1``
``callers``     access keys in HTTP headers
``daemon``      the connection to the daemon
``problems``    errors, as problem details (RFC 9457)
``openapi``     the OpenAPI document
``process``     the process

Imports: ``dmq.admin``, ``dmq.rocketmq_server.codec``, ``dmq.config``, ``dmq.runtime``. Interface: the names below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports
from broker_adapter.runtime.extras import require

require("the HTTP API", "http", "starlette", "uvicorn")

if TYPE_CHECKING:
    from dmq.http_api.process import run

__all__ = ["run"]

__getattr__ = lazy_exports(__name__, {"dmq.http_api.process": "run"})
