"""Routes of the console: screens, sign-in, and the changes that a form can make."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker_adapter.runtime.clock import Clock, SystemClock
from dmq.admin.client import CallRefused, DaemonUnavailable, NotAllowed, NotFound
from dmq.config.units import format_time, is_loopback
from dmq.console import shown
from dmq.console.access import AllowedCalls
from dmq.console.live import STREAMS_MAX, Feed, OverviewFeed, ScreenFeed
from dmq.console.sessions import IDLE_S_MAX, BrowserSession, BrowserSessions, Connect
from dmq.console.views import FORMS, MENU, SCREENS, Form, Screen, Values
from dmq.errors import DmqError
from dmq.runtime.guess_limit import GuessLimit, GuessRate
from dmq.runtime.hosts import host_of

FORM_BYTES_MAX: Final = 64 * 1024
FORM_S_MAX: Final = 30.0  # until it was received
FORM_FIELDS_MAX: Final = 1_020  # 1,000 chosen rows, and the other fields of a form
_WHY_CHARS_MAX: Final = 200
_GUESSES: Final = GuessRate(per_address=10, in_all=100, period_s=60.0)
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Of the report of an audit: a page from a file, which runs no script and has an origin of its own.
_REPORT_POLICY: Final = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none';"
    " frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer a form has no origin
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_STATUS: Final[Mapping[type[DmqError], int]] = {
    NotAllowed: 403,
    NotFound: 404,
    CallRefused: 400,
    DaemonUnavailable: 503,
}


class ConsoleSettings(NamedTuple):
    """Settings of a console. ``address`` is the daemon's, ``port`` its own.

    With ``is_encrypted`` it is served by HTTPS. With ``requires_sign_in`` no page is shown without an access key.
    """

    address: str
    port: int
    is_read_only: bool = False
    is_encrypted: bool = False
    requires_sign_in: bool = False


class FormRejected(Exception):
    """A form that is not accepted; nothing was done."""


class Console:
    """Pages about one daemon."""

    def __init__(self, settings: ConsoleSettings, connect: Connect, clock: Clock | None = None) -> None:
        self._settings = settings
        self._sessions = BrowserSessions(connect)
        prefix = "__Host-" if settings.is_encrypted else ""  # no other host of the domain can set it
        self._cookie = f"{prefix}dmq_console_{settings.port}"  # browsers do not separate cookies by port
        self._templates = _templates()
        self._streams = 0
        self._guesses = GuessLimit(_GUESSES, clock or SystemClock())

    def app(self) -> ASGIApp:
        """Return the application."""
        static = GZipMiddleware(StaticFiles(directory=str(files("dmq.console") / "static")), minimum_size=500)
        screens = [Route(each.path, partial(self._screen, each), methods=["GET"]) for each in SCREENS]
        forms = [Route(each.path, partial(self._form, partial(self._change, each)), methods=["POST"]) for each in FORMS]
        others = [
            Route("/events", self._overview_events, methods=["GET"]),
            Route("/events/screen", self._screen_events, methods=["GET"]),
            Route("/audit/report", self._report, methods=["GET"]),
            Route("/sign-in", self._sign_in_page, methods=["GET"]),
            Route("/sign-in", partial(self._form, self._sign_in), methods=["POST"]),
            Route("/sign-out", partial(self._form, self._sign_out), methods=["POST"]),
            Mount("/static", static),
        ]
        missing = {404: partial(self._missing, 404), 405: partial(self._missing, 405)}
        app = Starlette(routes=[*screens, *forms, *others], exception_handlers=missing)
        app.router.redirect_slashes = False  # the address would have the host name of the request
        return _Guard(app, any_host=self._settings.requires_sign_in)

    # -- pages --------------------------------------------------------------------------------------------------------

    async def _screen(self, screen: Screen, request: Request) -> Response:
        return await asyncio.to_thread(self._shown, screen, request)

    def _shown(self, screen: Screen, request: Request) -> Response:
        session = self._session(request)
        if self._lacks_key(session):
            return self._to_sign_in(request, session)
        try:
            values = screen.view(session.client, defaultdict(str, request.query_params))
        except NotAllowed as error:
            if not session.access_key:
                return self._to_sign_in(request, session)
            return self._failed(request, session, error)
        except DmqError as error:
            return self._failed(request, session, error)
        return self._page(request, session, f"{screen.template}.html.j2", values, values.get("status_code", 200))

    async def _report(self, request: Request) -> Response:
        """Send the page of the newest report of an audit, as the file has it."""
        return await asyncio.to_thread(self._shown_report, request)

    def _shown_report(self, request: Request) -> Response:
        session = self._session(request)
        if self._lacks_key(session):
            return self._to_sign_in(request, session)
        try:
            page = session.client.read_audit_page()
        except NotAllowed as error:
            return self._failed(request, session, error) if session.access_key else self._to_sign_in(request, session)
        except DmqError as error:
            return self._failed(request, session, error)
        headers = {"Content-Security-Policy": _REPORT_POLICY, "Cache-Control": "no-store"}
        if request.query_params.get("download") == "1":
            headers["Content-Disposition"] = 'attachment; filename="audit-report.html"'
        return HTMLResponse(page, headers=headers)

    def _failed(self, request: Request, session: BrowserSession, error: Exception, status: int = 0) -> Response:
        status = status or next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        values: Values = {"error": str(error), "status_code": status, "command": ""}
        response = self._page(request, session, "error.html.j2", values, status)
        if status == 503 and request.method == "GET":
            response.headers["Refresh"] = "3"
        return response

    async def _missing(self, status: int, request: Request, error: Exception) -> Response:  # noqa: ARG002 - a handler
        text = "There is no such page." if status == 404 else "This address does not accept this method."
        return self._failed(request, self._session(request), FormRejected(text), status)

    def _page(
        self, request: Request, session: BrowserSession, template: str, values: Values, status: int = 200
    ) -> Response:
        text = self._render(template, {**self._common(session, request.url.path, request.query_params), **values})
        response = HTMLResponse(text, status, headers={"Cache-Control": "no-store"})
        return self._with_cookie(response, session)

    def _common(self, session: BrowserSession, path: str, query: Mapping[str, str]) -> Values:
        return {
            "layout": "live.html.j2",
            "path": path,
            "session": session,
            "address": self._settings.address,
            "is_read_only": self._settings.is_read_only,
            "may": AllowedCalls(session.client, is_read_only=self._settings.is_read_only),
            "menu": MENU,
            "url": partial(_url, path, query),
        }

    def _render(self, template: str, values: Values) -> str:
        return self._templates.get_template(template).render(values)

    async def _overview_events(self, request: Request) -> Response:
        span = request.query_params.get("span", "hour")
        return self._events(request, lambda session: OverviewFeed(session.client, self._render, span))

    async def _screen_events(self, request: Request) -> Response:
        """Send the part of the page at the address ``at`` again and again."""
        path, _, query_text = request.query_params.get("at", "").partition("?")
        screen = next((each for each in SCREENS if each.is_live and each.path == path), None)
        if screen is None:
            return Response("no such live page", 404)
        query = QueryParams(query_text)
        return self._events(request, lambda session: ScreenFeed(partial(self._part, screen, query, session)))

    def _part(self, screen: Screen, query: Mapping[str, str], session: BrowserSession) -> str:
        values = screen.view(session.client, defaultdict(str, query))
        common = self._common(session, screen.path, query)
        return self._render(f"{screen.template}.html.j2", {**common, **values, "layout": "part.html.j2"})

    def _events(self, request: Request, feed_of: Callable[[BrowserSession], Feed]) -> Response:
        session = self._sessions.find(request.cookies.get(self._cookie, ""))
        if session is None or self._lacks_key(session):
            return Response("open a page first", 403)
        if self._streams >= STREAMS_MAX:
            return Response("too many open pages", 503)
        feed = feed_of(session)

        async def counted() -> Any:  # noqa: ANN401 - an asynchronous generator
            self._streams += 1
            try:
                async with contextlib.aclosing(feed.events()) as events:  # type: ignore[type-var]
                    async for event in events:
                        yield event
            finally:
                self._streams -= 1

        return StreamingResponse(counted(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    # -- sessions -----------------------------------------------------------------------------------------------------

    def _session(self, request: Request) -> BrowserSession:
        return self._sessions.find(request.cookies.get(self._cookie, "")) or self._sessions.start()

    def _lacks_key(self, session: BrowserSession) -> bool:
        return self._settings.requires_sign_in and not session.access_key

    def _to_sign_in(self, request: Request, session: BrowserSession) -> Response:
        target = quote(f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path)
        return self._with_cookie(RedirectResponse(f"/sign-in?next={target}", 303), session)

    def _with_cookie(self, response: Response, session: BrowserSession) -> Response:
        response.set_cookie(
            self._cookie,
            session.cookie,
            max_age=int(IDLE_S_MAX),
            path="/",
            secure=self._settings.is_encrypted,
            httponly=True,
            samesite="strict",
        )
        return response

    def _sign_in_page(self, request: Request) -> Response:
        values: Values = {"next": _own_path(request.query_params.get("next", "/")), "error": "", "command": ""}
        return self._page(request, self._session(request), "sign_in.html.j2", values)

    # -- forms --------------------------------------------------------------------------------------------------------

    async def _form(
        self, act: Callable[[Request, BrowserSession, Mapping[str, str]], Any], request: Request
    ) -> Response:
        """Check the origin and the token of a form, and act on it."""
        session = self._sessions.find(request.cookies.get(self._cookie, ""))
        if session is None:
            return self._failed(
                request, self._session(request), FormRejected("The session has ended. Open the page again."), 403
            )
        try:
            async with asyncio.timeout(FORM_S_MAX):
                fields = await _fields(request)
            self._check_origin(request)
            if fields.get("token") != session.form_token:
                raise FormRejected("The form has no valid token. Open the page again.")
            response: Response = await act(request, session, fields)
        except TimeoutError:
            return self._failed(request, session, FormRejected(f"The form took more than {FORM_S_MAX:g} s."), 408)
        except FormRejected as error:
            return self._failed(request, session, error, 403)
        except DmqError as error:
            return self._failed(request, session, error)
        return response

    def _check_origin(self, request: Request) -> None:
        scheme = "https" if self._settings.is_encrypted else "http"
        if request.headers.get("origin", "") != f"{scheme}://{request.headers.get('host', '')}":
            raise FormRejected("The form was sent by another site.")

    async def _sign_in(self, request: Request, session: BrowserSession, fields: Mapping[str, str]) -> Response:
        key, secret, target = fields.get("access_key", ""), fields.get("secret", ""), _own_path(fields.get("next", "/"))
        values: Values = {"next": target, "error": "Give an access key and its secret.", "command": ""}
        if not (key and secret and key.isascii() and key.isprintable()):
            return self._page(request, session, "sign_in.html.j2", values, 400)
        if self._settings.requires_sign_in and await asyncio.to_thread(self._is_open):
            raise FormRejected("The daemon has no access keys (acl): this console serves its own host only.")
        address = request.client.host if request.client is not None else ""
        if wait_s := self._guesses.admit(address):
            error = f"Too many sign-ins were refused. Sign in again in {math.ceil(wait_s)} s."
            response = self._page(request, session, "sign_in.html.j2", {**values, "error": error}, 429)
            response.headers["Retry-After"] = str(math.ceil(wait_s))
            return response
        made = await asyncio.to_thread(self._sessions.start, key, secret)
        try:
            await asyncio.to_thread(made.client.list_topics, limit=1)
        except DmqError as error:
            self._sessions.end(made)
            if not isinstance(error, NotAllowed):
                self._guesses.not_refused(address)
                raise
            return self._page(request, session, "sign_in.html.j2", {**values, "error": str(error)}, 403)
        self._guesses.right(address)
        self._sessions.end(session)
        return self._with_cookie(RedirectResponse(target, 303), made)

    def _is_open(self) -> bool:
        """Return True if the daemon accepts calls without an access key."""
        try:
            self._sessions.unsigned.list_topics(limit=1)
        except NotAllowed:
            return False
        return True

    async def _sign_out(self, request: Request, session: BrowserSession, fields: Mapping[str, str]) -> Response:  # noqa: ARG002
        self._sessions.end(session)
        return self._with_cookie(RedirectResponse("/", 303), self._sessions.start())

    async def _change(
        self,
        form: Form,
        request: Request,  # noqa: ARG002 - the signature of a handler
        session: BrowserSession,
        fields: Mapping[str, str],
    ) -> Response:
        """Make the change of a form, and show the page with its result."""
        if self._settings.is_read_only:
            raise FormRejected("This console is read-only.")
        why = fields.get("why", "")
        if len(why) > _WHY_CHARS_MAX or not why.isprintable():
            raise FormRejected(f"A reason has up to {_WHY_CHARS_MAX} printable characters.")
        return RedirectResponse(await asyncio.to_thread(self._changed, form, session, fields, why or form.why), 303)

    def _changed(self, form: Form, session: BrowserSession, fields: Mapping[str, str], why: str) -> str:
        with self._sessions.connect(session.signer, why) as client:
            return form.act(client, defaultdict(str, fields))


class _Guard:
    """Refuse requests for other hosts, against DNS rebinding, and add the security headers to each response.

    With ``any_host`` every host is its own: without a sign-in to it, a page of another name reads nothing.
    """

    def __init__(self, app: ASGIApp, *, any_host: bool) -> None:
        self._app = app
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(each for each in _HEADERS if each[0] not in own)]
            await send(message)

        is_own = self._any_host or _is_own_host(dict(scope["headers"]).get(b"host", b""))
        await (self._app if is_own else _WRONG_HOST)(scope, receive, guarded)


_WRONG_HOST: Final = Response("this console is reachable by a loopback address only", 421)


def _is_own_host(host: bytes) -> bool:
    return is_loopback(host_of(host.decode("latin-1")) or "")


async def _fields(request: Request) -> dict[str, str]:
    """Return the fields of a form. The values of a name that is repeated are lines."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            raise FormRejected(f"A form has up to {FORM_BYTES_MAX:,} bytes.")
    try:
        found = parse_qs(
            body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=FORM_FIELDS_MAX
        )
    except ValueError:
        raise FormRejected("The form cannot be read.") from None
    return {name: "\n".join(values) for name, values in found.items()}


def _own_path(target: str) -> str:
    """Return the address of a page of the console; the overview for any other address."""
    is_own = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if is_own else "/"


def _url(path: str, query: Mapping[str, str], **changes: object) -> str:
    """Return the address of this page with some parameters changed; an empty value removes one."""
    merged = {**query, **changes}
    kept = {name: value for name, value in merged.items() if value not in {"", None}}
    return f"{path}?{urlencode(kept)}" if kept else path


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("dmq.console"),
        autoescape=True,
        finalize=shown.visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {each.__name__: each for each in (shown.count, shown.duration, shown.distance, shown.size)}
    templates.filters |= {"time": format_time, "query": urlencode}
    return templates
