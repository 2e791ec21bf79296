"""Authentication and authorization of calls."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

import structlog

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.errors import Rule as Broken
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire.signature import signature_of
from dmq.acl.file import KeyFile, Keys
from dmq.acl.rules import NAME_CHARS_MAX, AccessKey, Need
from dmq.acl.signature import Header, claim_of, dated_ms, unauthorized

log = structlog.get_logger("dmq.acl")

_DECISIONS_KEPT: Final = 8192
_LOG_EVERY_S: Final = 1.0  # a client repeats a refused call for ever
# Unknown keys are refused in the same time as known ones.
_NOBODY: Final = AccessKey(name="", secret=b"nobody")


class Authenticator:
    """The check of calls against the access keys. The event loop owns it.

    Raises ``Refused`` with ``UNAUTHORIZED`` or ``FORBIDDEN``. A refused call has no effect.
    """

    def __init__(self, file: KeyFile, clock: Clock) -> None:
        """Read ``file``; raise ``AclError`` if it cannot be used."""
        self._file = file
        self._clock = clock
        self._keys = file.keys()
        self._decide = lru_cache(_DECISIONS_KEPT)(AccessKey.may)
        self._log_at_s = 0.0
        self._unlogged = 0

    def admit(self, rpc: str, header: Header, needs: Iterable[Need]) -> AccessKey:
        """Return the key that signed a call and has all of ``needs``."""
        key: AccessKey | None = None
        try:
            key = self._signer(header)
            self._check(key, needs)
        except Refused as refused:
            self._tell(rpc, key, refused)
            raise
        return key

    def enter(self, rpc: str, header: Header, lacks: Callable[[AccessKey], Need | None]) -> AccessKey:
        """Return the key that signed a call unless it ``lacks`` every rule for it; ``check`` covers the named
        resources.
        """
        key: AccessKey | None = None
        try:
            key = self._signer(header)
            need = None if key.is_admin else lacks(key)
            if need is not None:
                raise Refused(Broken.FORBIDDEN, f"access key {key.name!r} lacks {need}")
        except Refused as refused:
            self._tell(rpc, key, refused)
            raise
        return key

    def check(self, rpc: str, key: AccessKey, needs: Iterable[Need]) -> None:
        """Check the resources in the request of a call that ``enter`` admitted."""
        try:
            self._check(key, needs)
        except Refused as refused:
            self._tell(rpc, key, refused)
            raise

    def recheck(self, rpc: str, key: AccessKey, needs: Iterable[Need]) -> None:
        """Check a stream of ``key`` against the current rules: the key may be removed, or have fewer permissions."""
        try:
            now = self._current().by_name.get(key.name)
            if now is None or now.secret != key.secret:
                raise unauthorized("the access key was removed or changed")
            self._check(now, needs)
        except Refused as refused:
            self._tell(rpc, key, refused)
            raise

    def _current(self) -> Keys:
        keys = self._file.keys()
        if keys is not self._keys:
            self._keys = keys
            self._decide.cache_clear()  # removed secrets must not stay in the cache
        return keys

    def _signer(self, header: Header) -> AccessKey:
        keys = self._current()
        claim = claim_of(header)
        key = keys.by_name.get(claim.access_key, _NOBODY)
        is_right = hmac.compare_digest(signature_of(key.secret, claim.date_time), claim.signature)
        if not is_right or key is _NOBODY:
            raise unauthorized("unknown access key, or a signature with another secret")
        if keys.window_ms is not None:
            away_ms = abs(dated_ms(claim.date_time) - self._clock.now_ms())
            if away_ms > keys.window_ms:
                away = f"{away_ms / 3_600_000:.1f} h away from the clock of this host"
                raise unauthorized(f"the signature is dated {away}, {keys.window_ms / 3_600_000:g} h are allowed")
        return key

    def _check(self, key: AccessKey, needs: Iterable[Need]) -> None:
        for need in needs:
            # The length of a name is not validated yet: long names are checked without the cache.
            if not (self._decide(key, need) if len(need.name) <= NAME_CHARS_MAX else key.may(need)):
                raise Refused(Broken.FORBIDDEN, f"access key {key.name!r} lacks {need}")

    def _tell(self, rpc: str, key: AccessKey | None, refused: Refused) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._log_at_s:
            self._unlogged += 1
            return
        # Not the name that an unauthenticated caller sends: it may be a misplaced secret.
        name = key.name if key is not None else ""
        log.warning("access_refused", rpc=rpc, access_key=name, why=str(refused), unlogged=self._unlogged)
        self._log_at_s, self._unlogged = now_s + _LOG_EVERY_S, 0
