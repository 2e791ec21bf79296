"""The OpenAPI document of all routes.

python -m dmq.http_api.openapi > docs/reference/http-api.json
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from pydantic import TypeAdapter

from dmq.http_api import problems
from dmq.http_api.routes import ROUTES, ApiRoute
from dmq.http_api.schemas import REF, Request

_ERRORS: Final = {
    "400": "The request is not readable",
    "401": "An access key is required, or this one is unknown",
    "403": "The access key lacks a permission, or a page of another site sent the request",
    "404": "No such object",
    "408": "The body was not received in time",
    "413": "The body is too large",
    "415": "Another media type than application/json",
    "421": "A request without an access key names another host",
    "422": "A field or parameter is invalid",
    "429": "A limit is reached; nothing was done",
    "500": "Internal error",
    "501": "The daemon does not support it",
    "503": "The daemon does not answer; the outcome may be unknown",
    "504": "No answer in time; the outcome is unknown",
}


def document() -> dict[str, Any]:
    """Return the document."""
    components: dict[str, Any] = {"Problem": problems.schema()}
    problem = {problems.MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.shown_path, {})[route.method.lower()] = _operation(route, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rock-DMQ HTTP API",
            "version": "v1",
            "description": "Messages and objects of a daemon. An OK follows the sync: what is accepted is durable.",
        },
        "paths": paths,
        "components": {
            "responses": {code: {"description": text, "content": problem} for code, text in _ERRORS.items()},
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "KEY:SECRET"},
                "signature": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "MQv2-HMAC-SHA1 over the header X-Mq-Date-Time, as official clients sign calls",
                },
            },
        },
        "security": [{"bearer": []}, {"signature": []}, {}],
    }


def _operation(route: ApiRoute, components: dict[str, Any]) -> dict[str, Any]:
    parameters = _parameters(route.path_model, "path", components)
    if route.query is not None:
        parameters += _parameters(route.query, "query", components)
    answer = {"application/json": {"schema": route.schema(components)}}
    operation: dict[str, Any] = {
        "operationId": route.path_model.__name__.removesuffix("Path"),
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": parameters,
        "responses": {
            str(route.status): {"description": "Done, and durable if it is a change", "content": answer},
            **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS},
        },
    }
    if route.body is not None:
        schema = _schema(route.body, components)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _parameters(model: type[Request], place: str, components: dict[str, Any]) -> list[dict[str, Any]]:
    schema = _schema(TypeAdapter(model), components)
    required = schema.get("required", [])
    return [
        {"name": name, "in": place, "required": name in required, "schema": each}
        for name, each in schema.get("properties", {}).items()
    ]


def _schema(model: TypeAdapter[Any], components: dict[str, Any]) -> dict[str, Any]:
    schema = model.json_schema(ref_template=REF)
    components.update(schema.pop("$defs", {}))
    return schema


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")
