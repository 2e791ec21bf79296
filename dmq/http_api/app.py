"""The application: limits, routing, validation and errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final, TypeVar

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
from dmq.admin import admin_v1 as wire
from dmq.http_api.callers import Metadata, credentials_of, metadata_of
from dmq.http_api.daemon import DaemonChannel
from dmq.http_api.openapi import document
from dmq.http_api.problems import Problem, of_rule, pointer
from dmq.http_api.routes import ROUTES, ApiRoute, Given
from dmq.http_api.sending import KINDS
from dmq.runtime.guess_limit import CALLS, GuessLimit
from dmq.runtime.hosts import host_of, is_origin_of

BODY_BYTES_MAX: Final = 16 * 2**20  # of one request
BODIES_BYTES_MAX: Final = 64 * 2**20  # of all requests that are being received or answered
RECEIVE_S_MAX: Final = 30.0
UNCHECKED_BYTES_MAX: Final = 64 * 1024  # of a body that is read before the daemon has checked the access key
_LOOK_AGAIN_S: Final = 5.0  # whether the daemon has access keys
_ERRORS_MAX: Final = 20
_JSON: Final = "application/json"
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_Answer = TypeVar("_Answer")

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
                        raise _too_large()
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
        self._has_keys = False  # whether the daemon refuses calls without an access key
        self._looks_again_s = 0.0

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
        made = Starlette(routes=routes, exception_handlers=handlers)
        made.router.redirect_slashes = False  # the address would have the host name of the request
        return made

    def _endpoint(self, routes: Mapping[str, ApiRoute]) -> Any:  # noqa: ANN401 - of Starlette
        async def endpoint(request: Request) -> Response:
            route = routes["GET" if request.method == "HEAD" else request.method]
            try:
                given = await self._given(route, request)
                answer = await self._called(request, lambda: route.call(self._daemon, given, self._clock))
                return _json(answer, route.status)
            except Problem as problem:
                return _problem(problem)
            except ClientDisconnect:
                return Response(status_code=400)
            finally:
                self._bodies.release(request)

        return endpoint

    async def _called(self, request: Request, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Call the daemon; raise ``Problem(429)`` if too many credentials of the caller's address were refused."""
        credentials, guesses = credentials_of(request.headers), self._guesses
        if not credentials:
            return await call()
        address = request.client.host if request.client is not None else ""
        if wait_s := guesses.admit(address, credentials):
            refused = Problem(429, "too many access keys of this address were refused, so this one is not checked")
            refused.retry_after_s = math.ceil(wait_s)
            raise refused
        try:
            answer = await call()
        except Problem as problem:
            if problem.status != HTTPStatus.UNAUTHORIZED:
                guesses.not_refused(address, credentials)
            raise
        guesses.right(address, credentials)
        return answer

    async def _check_host(self, request: Request) -> None:
        """Refuse a page of another site under a host name that leads to this host.

        It has no access key, but may send any text as one, so a key counts only if the daemon checks keys.
        """
        host = host_of(request.headers.get("host", ""))
        if host is None:
            raise Problem(400, "the header Host is invalid")
        if not _is_own_name(host) and not (request.headers.get("authorization") and await self._checks_keys()):
            raise Problem(421, "without an access key, the host is an IP address or localhost")

    async def _checks_keys(self) -> bool:
        """Return True if the daemon refuses calls without an access key."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._looks_again_s:
            self._has_keys = not await self._is_known(())
            self._looks_again_s = now_s + _LOOK_AGAIN_S
        return self._has_keys

    async def _is_known(self, caller: Metadata) -> bool:
        """Return False if the daemon refuses the access key of a caller, or its absence."""
        try:
            await self._daemon.call(wire.METHODS["GetAccess"], wire.GetAccessRequest(), caller)
        except Problem as problem:
            if problem.status == HTTPStatus.UNAUTHORIZED:
                return False
            if problem.status != HTTPStatus.FORBIDDEN:
                raise
        return True

    async def _check_length(self, request: Request, caller: Metadata) -> None:
        """Refuse a body that is too large, and a large one with a refused access key, unread."""
        length = request.headers.get("content-length")
        if length is not None and int(length) > BODY_BYTES_MAX:
            raise _too_large()
        if (length is None or int(length) > UNCHECKED_BYTES_MAX) and await self._checks_keys():
            ask = partial(self._daemon.call, wire.METHODS["GetAccess"], wire.GetAccessRequest(), caller)
            try:
                await self._called(request, ask)
            except Problem as problem:
                if problem.status != HTTPStatus.FORBIDDEN:
                    raise

    async def _given(self, route: ApiRoute, request: Request) -> Given:
        await self._check_host(request)
        _check_origin(request)
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
        await self._check_length(request, caller)
        body = await self._bodies.read(request) or b"{}"
        try:
            valid = route.body.validate_json(body)
        except ValidationError as error:
            raise _of_body(error) from None
        traceparent = request.headers.get(TRACEPARENT, "")
        return Given(caller=caller, parameters=parameters, body=valid, traceparent=traceparent)


def _is_own_name(host: str) -> bool:
    """Return True for a host that no other site has: an address, a name of this host, or none (HTTP/1.0)."""
    try:
        ip_address(host)
    except ValueError:
        return not host or host.lower() == "localhost" or host.lower().endswith(".localhost")
    return True


def _check_origin(request: Request) -> None:
    """Refuse the request of a page of another site. No answer allows such pages, so that a browser asks first."""
    origin = request.headers.get("origin")
    if origin is not None and not is_origin_of(origin, request.headers.get("host", "")):
        raise Problem(403, "the request was sent by a page of another site")


def _too_large() -> Problem:
    return Problem(413, f"the body of a request has at most {BODY_BYTES_MAX} bytes")


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
