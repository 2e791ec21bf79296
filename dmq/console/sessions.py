"""Sessions of browsers: an unguessable cookie, the token of its forms, and the access key of the person.

A session without an access key is its cookie alone, which this process can recognise: however many are made, they need
no memory and end no session with a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.wire.signature import Signer
from dmq.admin.client import AdminClient

SESSIONS_MAX: Final = 1_000  # with an access key; the one that was used least recently ends
IDLE_S_MAX: Final = 8 * 3600.0

Connect = Callable[[Signer | None, str], AdminClient]  # with the reason that is recorded with changes


class BrowserSession(NamedTuple):
    """A browser. Without an access key its calls are unsigned."""

    cookie: str
    form_token: str
    access_key: str
    signer: Signer | None
    client: AdminClient


class BrowserSessions:
    """Open sessions, in memory only: a restart of the console ends them. Thread-safe."""

    def __init__(self, connect: Connect, clock: Clock | None = None) -> None:
        self.connect = connect
        self._clock = clock or SystemClock()
        self.unsigned = connect(None, "")
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._used: OrderedDict[str, tuple[BrowserSession, float]] = OrderedDict()

    def find(self, cookie: str) -> BrowserSession | None:
        """Return the session of a cookie, or None if there is none or it was idle for too long."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            found = self._used.pop(cookie, None)
            if found is None:
                nonce, _, code = cookie.partition(".")
                return self._unsigned(nonce) if hmac.compare_digest(code.encode(), self._code("c", nonce)) else None
            session, used_s = found
            if now_s - used_s <= IDLE_S_MAX:
                self._used[cookie] = session, now_s
                return session
        self._close(session)
        return None

    def start(self, access_key: str = "", secret: str = "") -> BrowserSession:
        """Start a session. Without an access key it shares the unsigned connection."""
        if not access_key:
            return self._unsigned(secrets.token_urlsafe(32))
        signer = Signer(access_key, secret, SystemClock())
        client = self.connect(signer, "")
        session = BrowserSession(secrets.token_urlsafe(32), secrets.token_urlsafe(32), access_key, signer, client)
        with self._lock:
            self._used[session.cookie] = session, self._clock.monotonic_s()
            ended = [self._used.popitem(last=False)[1][0] for _ in range(len(self._used) - SESSIONS_MAX)]
        for each in ended:
            self._close(each)
        return session

    def end(self, session: BrowserSession) -> None:
        """End a session. Idempotent."""
        with self._lock:
            self._used.pop(session.cookie, None)
        self._close(session)

    def _unsigned(self, nonce: str) -> BrowserSession:
        cookie = f"{nonce}.{self._code('c', nonce).decode()}"
        return BrowserSession(cookie, self._code("f", nonce).decode(), "", None, self.unsigned)

    def _code(self, kind: str, nonce: str) -> bytes:
        return hmac.new(self._secret, f"{kind}.{nonce}".encode(), hashlib.sha256).hexdigest().encode()

    def _close(self, session: BrowserSession) -> None:
        if session.client is not self.unsigned:
            session.client.close()
