"""Errors as problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import grpc

from broker_adapter.contracts.errors import Rule
from broker_adapter.wire import rocketmq_v2 as public
from dmq.rocketmq_server.codec.codes import CODES

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1

_RULES: Final = MappingProxyType({int(code): rule for rule, code in CODES.items()})
_RULE_NAMES: Final = MappingProxyType({rule.value: rule for rule in Rule})
# The status of each rule; 422 for all others, which are about the content of a request.
_STATUS: Mapping[Rule, int] = MappingProxyType(
    {
        Rule.TOPIC_UNKNOWN: 404,
        Rule.GROUP_UNKNOWN: 404,
        Rule.NOT_FOUND: 404,
        Rule.OFFSET_UNKNOWN: 404,
        Rule.UNAUTHORIZED: 401,
        Rule.FORBIDDEN: 403,
        Rule.BODY_SIZE: 413,
        Rule.UNSUPPORTED: 501,
    }
)
_RULE_OF_CODE: Mapping[grpc.StatusCode, Rule] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: Rule.REQUEST,
        grpc.StatusCode.NOT_FOUND: Rule.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED: Rule.UNAUTHORIZED,
        grpc.StatusCode.PERMISSION_DENIED: Rule.FORBIDDEN,
    }
)
_STATUS_OF_CODE: Mapping[grpc.StatusCode, int] = MappingProxyType(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
        grpc.StatusCode.UNAVAILABLE: 503,
        grpc.StatusCode.DEADLINE_EXCEEDED: 504,
        grpc.StatusCode.ABORTED: 504,
        grpc.StatusCode.UNIMPLEMENTED: 501,
    }
)
IN_DOUBT: Final = frozenset({503, 504})


class Problem(Exception):
    """An answer that reports an error. ``members`` are further members of the document."""

    retry_after_s = RETRY_AFTER_S

    def __init__(self, status: int, detail: str, *, rule: Rule | None = None, **members: object) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.rule = rule
        self.members = members

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {"Content-Type": MEDIA_TYPE}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = 'Bearer realm="rock-dmq", MQv2-HMAC-SHA1'
        if self.status in {429, 503}:
            headers["Retry-After"] = str(self.retry_after_s)
        return headers

    def document(self) -> dict[str, object]:
        """Return the document. Its type names the rule; an error without a rule has the title of its status."""
        status = HTTPStatus(self.status)
        kind = "about:blank" if self.rule is None else type_of(self.rule)
        title = status.phrase if self.rule is None else self.rule.value
        return {"type": kind, "title": title, "status": self.status, "detail": self.detail, **self.members}


def type_of(rule: Rule) -> str:
    """Return the URI of a rule."""
    return f"urn:rock-dmq:rule:{rule.name.lower().replace('_', '-')}"


def of_rule(rule: Rule, detail: str, **members: Any) -> Problem:  # noqa: ANN401 - of a JSON document
    """Return the problem of a violated rule."""
    return Problem(_STATUS.get(rule, 422), detail, rule=rule, **members)


def of_call(code: grpc.StatusCode, text: str) -> Problem:
    """Return the problem of a call that failed with a gRPC status."""
    detail = " ".join(text.split())
    if code in _RULE_OF_CODE:  # a refusal begins with its rule
        return of_rule(_RULE_NAMES.get(detail.partition(":")[0], _RULE_OF_CODE[code]), detail)
    status = _STATUS_OF_CODE.get(code, 500)
    return Problem(status, detail or HTTPStatus(status).phrase)


def of_status(status: public.Status, **members: Any) -> Problem:  # noqa: ANN401 - of a JSON document
    """Return the problem of a status of the public protocol that is not OK."""
    code = int(status.code)
    if code in _RULES:
        return of_rule(_RULES[code], status.message, code=code, **members)
    return Problem(429 if 42900 <= code < 43000 else 503, status.message, code=code, **members)


def pointer(path: Sequence[int | str]) -> str:
    """Return a path of names and indices as a JSON pointer (RFC 6901)."""
    return "".join(f"/{str(each).replace('~', '~0').replace('/', '~1')}" for each in path)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a problem document."""
    text, number = {"type": "string"}, {"type": "integer"}
    error = {"type": "object", "properties": {"detail": text, "pointer": text, "parameter": text}}
    return {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {**text, "description": "urn:rock-dmq:rule:NAME for a violated rule, else about:blank"},
            "title": text,
            "status": number,
            "detail": text,
            "code": {**number, "description": "Code of the public protocol"},
            "errors": {"type": "array", "items": error},
            "message_ids": {"type": "array", "items": text, "description": "Of a send in doubt: repeat it with these"},
        },
    }
