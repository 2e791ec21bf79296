"""The application: limits, routing, validation and errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

import structlog
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from broker_adapter.contracts.errors import Rule
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.trace_context import TRACEPARENT
from dmq.http_api.callers import credentials_of, metadata_of
from dmq.http_api.daemon import DaemonChannel
from dmq.http_api.openapi import document
from dmq.http_api.problems import Problem, of_rule, pointer
from dmq.http_api.routes import ROUTES, Answer, ApiRoute, Given
from dmq.http_api.sending import KINDS
from dmq.runtime.guess_limit import CALLS, GuessLimit

BODY_BYTES_MAX: Final = 16 * 2**20  # of one request
BODIES_BYTES_MAX: Final = 64 * 2**20  # of all requests that are being received or answered
RECEIVE_S_MAX: Final = 30.0
_ERRORS_MAX: Final = 20
_JSON: Final = "application/json"
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

log = structlog.get_logger("dmq.http_api")


class _Bodies:
    """Bytes of all bodies in memory."""

    def __init__(self) -> None:
        self._bytes = 0

    async def read(self, request: Request) -> bytes:
        """Return the body of a request. Raise ``Problem`` if it is too large, too slow, or one too many."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(RECEIVE_S_MAX):
                async for part in request.stream():
                    size += len(part)
                    self._hold(request, len(part))
                    if size > BODY_BYTES_MAX:
                        raise Problem(413, f"the body of a request has at most {BODY_BYTES_MAX} bytes")
                    parts.append(part)
        except TimeoutError:
            raise Problem(408, f"the body was not received within {RECEIVE_S_MAX:g} s") from None
        return b"".join(parts)

    def _hold(self, request: Request, size: int) -> None:
        if self._bytes + size > BODIES_BYTES_MAX:
            raise Problem(503, "too many requests are being received; try again later")
        self._bytes += size
        request.state.held = getattr(request.state, "held", 0) + size

    def release(self, request: Request) -> None:
        """Forget the body of an answered request."""
        self._bytes -= getattr(request.state, "held", 0)


class HttpApi:
    """The requests of one process."""

    def __init__(self, daemon: DaemonChannel, clock: Clock) -> None:
        self._daemon = daemon
        self._clock = clock
        self._bodies = _Bodies()
        self._guesses = GuessLimit(CALLS, clock)

    def application(self) -> Starlette:
        """Return the application."""
        openapi = json.dumps(document()).encode()

        async def show_openapi(_: Request) -> Response:
            return Response(openapi, media_type=_JSON)

        handlers: dict[Any, Any] = {HTTPException: _not_routed, Exception: _crashed}
        by_path: dict[str, dict[str, ApiRoute]] = {}
        for each in ROUTES:
            by_path.setdefault(each.path, {})[each.method] = each
        routes = [
            Route(path, self._endpoint(by_path[path]), methods=list(by_path[path]))
            for path in sorted(
                by_path, key=lambda path: ":path}" in path
            )  # a parameter with slashes matches the others
        ]
        routes.append(Route("/v1/openapi.json", show_openapi, methods=["GET"]))
        return Starlette(routes=routes, exception_handlers=handlers)

    def _endpoint(self, routes: Mapping[str, ApiRoute]) -> Any:  # noqa: ANN401 - of Starlette
        async def endpoint(request: Request) -> Response:
            route = routes["GET" if request.method == "HEAD" else request.method]
            try:
                given = await self._given(route, request)
                return _json(await self._answer(route, request, given), route.status)
            except Problem as problem:
                return _problem(problem)
            except ClientDisconnect:
                return Response(status_code=400)
            finally:
                self._bodies.release(request)

        return endpoint

    async def _answer(self, route: ApiRoute, request: Request, given: Given) -> Answer:
        """Call the daemon; raise ``Problem(429)`` if too many credentials of the caller's address were refused."""
        credentials, guesses = credentials_of(request.headers), self._guesses
        if not credentials:
            return await route.call(self._daemon, given, self._clock)
        address = request.client.host if request.client is not None else ""
        if wait_s := guesses.admit(address, credentials):
            refused = Problem(429, "too many access keys of this address were refused, so this one is not checked")
            refused.retry_after_s = math.ceil(wait_s)
            raise refused
        try:
            answer = await route.call(self._daemon, given, self._clock)
        except Problem as problem:
            if problem.status != HTTPStatus.UNAUTHORIZED:
                guesses.not_refused(address, credentials)
            raise
        guesses.right(address, credentials)
        return answer

    async def _given(self, route: ApiRoute, request: Request) -> Given:
        _check_host(request)
        caller = metadata_of(request.headers, self._clock)
        parameters = dict(_path(route, request))
        if route.query is None:
            if request.query_params:
                raise _invalid([{"parameter": name, "detail": "unknown parameter"} for name in request.query_params])
        else:
            parameters |= _query(route, request)
        if route.body is None:
            return Given(caller=caller, parameters=parameters)
        _check_media_type(request)
        body = await self._bodies.read(request) or b"{}"
        try:
            valid = route.body.validate_json(body)
        except ValidationError as error:
            raise _of_body(error) from None
        traceparent = request.headers.get(TRACEPARENT, "")
        return Given(caller=caller, parameters=parameters, body=valid, traceparent=traceparent)


def _check_host(request: Request) -> None:
    """Refuse a page of another site under a host name that resolves to this host: it has no access key."""
    if request.headers.get("authorization"):
        return
    host = request.url.hostname or ""
    try:
        ip_address(host)
    except ValueError:
        if host != "localhost" and not host.endswith(".localhost"):
            raise Problem(421, "without an access key, the host is an IP address or localhost") from None


def _check_media_type(request: Request) -> None:
    """Refuse other media types, which a page of another site could send without a question to this host."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != _JSON:
        raise Problem(415, f"the header Content-Type: {_JSON} is required (curl --json)")


def _path(route: ApiRoute, request: Request) -> Mapping[str, Any]:
    try:
        return route.path_model.model_validate(request.path_params).given()
    except ValidationError as error:
        raise _invalid(_parameters(error)) from None


def _query(route: ApiRoute, request: Request) -> Mapping[str, Any]:
    assert route.query is not None
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in route.repeated:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise _invalid([{"parameter": name, "detail": "given twice"}])
        else:
            values[name] = value
    try:
        return route.query.model_validate(values).given()
    except ValidationError as error:
        raise _invalid(_parameters(error)) from None


def _parameters(error: ValidationError) -> list[dict[str, str]]:
    return [{"parameter": str(each["loc"][0]) if each["loc"] else "", "detail": _told(each)} for each in _errors(error)]


def _of_body(error: ValidationError) -> Problem:
    found = _errors(error)
    if found and found[0]["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON in UTF-8: {found[0]['ctx']['error']}")
    errors = []
    for each in found:
        path = each["loc"][1:] if each["loc"] and each["loc"][0] in KINDS else each["loc"]
        errors.append({"pointer": pointer(path), "detail": _told(each)})
    return _invalid(errors)


def _errors(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_input=False)[:_ERRORS_MAX]


def _told(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown field"
    return error["msg"].removeprefix("Value error, ")


def _invalid(errors: list[dict[str, str]]) -> Problem:
    first = errors[0]
    where = first.get("pointer", first.get("parameter")) or "the request"
    return of_rule(Rule.REQUEST, f"{where}: {first['detail']}", errors=errors)


def _json(value: object, status: int) -> Response:
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(content, status, headers=_HEADERS, media_type=_JSON)


def _problem(problem: Problem) -> Response:
    content = json.dumps(problem.document(), ensure_ascii=False, separators=(",", ":")).encode()
    return Response(content, problem.status, headers={**_HEADERS, **problem.headers})


async def _not_routed(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {request.url.path}: {error.detail}; GET /v1/openapi.json has the routes"
    response = _problem(Problem(error.status_code, text))
    response.headers.update(error.headers or {})
    return response


async def _crashed(_: Request, error: Exception) -> Response:
    log.error("http_request_failed", error=f"{type(error).__name__}: {error}", exc_info=error)
    return _problem(Problem(500, "internal error; the log of the HTTP API has the details"))
