"""The file of access keys (TOML), reloaded when it changes.

signature_window = "15h"            # optional; "none": a signature never expires

[keys.shop]                         # the access key
secret = "..."
topics = { "orders-*" = "PUB|SUB", "prices" = "SUB" }
groups = { "shop-*" = "SUB" }

[keys.dashboard]
secret = "..."
role = "viewer"                     # or "operator", or "admin", which is `admin = true`
bodies = true                       # optional: with message bodies

[keys.operator]
secret = "..."
admin = true
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from broker_adapter.runtime.clock import Clock
from dmq.acl.rules import ACTIONS, ADMIN, ADMINISTRATOR, GROUP, OPERATE, OPERATOR, ROLES, TOPIC, AccessKey, AccessRule
from dmq.config.units import parse_duration
from dmq.errors import DmqError
from dmq.runtime.secret_file import read_secret_file

log = structlog.get_logger("dmq.acl")

# A date-time is local time: zones range from UTC-12 to UTC+14. The rest is a margin for clock differences.
WINDOW_MS_DEFAULT: Final = 15 * 3_600_000
_BYTES_MAX: Final = 1024 * 1024
_SECRET_CHARS_MAX: Final = 1024
_LOOK_S: Final = 1.0  # interval of the checks for a changed file
_NAME = re.compile(r"[!-+\-.0-~]{1,128}")  # visible ASCII for a header, without its separators comma and slash
_PATTERN = re.compile(r"[*%|a-zA-Z0-9_-]{1,255}")
_Stamp = tuple[int, int, int, int]


class AclError(DmqError):
    """The file of access keys cannot be used; the text has the position and the reason, and never a secret."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keys:
    """The access keys by name, and the maximum difference between a signature's date and now (``None``: any)."""

    by_name: Mapping[str, AccessKey]
    window_ms: int | None = WINDOW_MS_DEFAULT


@dataclass(slots=True)
class KeyFile:
    """Source of the current keys. The last valid keys apply while a changed file is invalid, which is logged once.

    ``problem`` is the error of the current file; empty if it is valid. Without ``tells`` another process logs it.
    """

    path: Path
    clock: Clock
    tells: bool = True
    problem: str = field(default="", init=False)
    _keys: Keys | None = field(default=None, init=False, repr=False)
    _stamp: _Stamp | None = field(default=None, init=False)
    _look_at_s: float = field(default=0.0, init=False)

    def keys(self) -> Keys:
        """Return the current keys; raise ``AclError`` if no valid file was ever read."""
        now_s = self.clock.monotonic_s()
        if self._keys is not None and now_s < self._look_at_s:
            return self._keys
        self._look_at_s = now_s + _LOOK_S
        stamp = _stamp_of(self.path)
        if self._keys is None or stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = read(self.path)
            except AclError as error:
                if self._keys is None:
                    raise
                if self.tells:
                    log.error("access_keys_load_failed", error=str(error), still="the ones before")  # noqa: TRY400
                self.problem = f"{error}; the access keys before it count"
            else:
                self.problem = ""
                if self.tells:
                    log.info("access_keys_loaded", path=str(self.path), keys=len(self._keys.by_name))
        return self._keys


def read(path: Path) -> Keys:
    """Read a file of access keys that only its owner, and at most its group, can read. Raises ``AclError``."""
    try:
        content = read_secret_file(path, _BYTES_MAX)
    except OSError as error:
        raise AclError(f"the file of access keys {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AclError(str(error)) from None
    try:
        return parse(content.decode())
    except UnicodeDecodeError:
        raise AclError(f"{path} is not UTF-8 text") from None
    except ValueError as error:  # tomllib's error is a ValueError
        raise AclError(f"{path}: {error}") from None


def parse(text: str) -> Keys:
    """Parse the content of a file of access keys; raise ``ValueError`` with the reason, without values."""
    document = tomllib.loads(text)
    _check_names(document, {"signature_window", "keys"}, "")
    tables = document.get("keys", {})
    if not isinstance(tables, dict) or not tables:
        raise ValueError("no access key; expected a table such as [keys.shop]")
    by_name = {name: _access_key(name, table) for name, table in tables.items()}
    return Keys(by_name=by_name, window_ms=_window_ms(document.get("signature_window")))


def is_access_key(name: str) -> bool:
    """Return True if ``name`` is a valid access key."""
    return _NAME.fullmatch(name) is not None


def _window_ms(value: object) -> int | None:
    if value is None:
        return WINDOW_MS_DEFAULT
    if value == "none":
        return None
    try:
        return parse_duration(str(value) if isinstance(value, (str, int)) else "")
    except ValueError as error:
        raise ValueError(f"signature_window: {error}, or none") from None


def _access_key(name: str, table: object) -> AccessKey:
    where = f"keys.{name}"
    if not is_access_key(name):
        raise ValueError(f"{where}: invalid access key; expected 1 to 128 visible ASCII characters without , and /")
    if not isinstance(table, dict):
        raise ValueError(f"{where}: expected a table")
    _check_names(table, {"secret", "admin", "role", "bodies", "topics", "groups"}, where)
    secret, is_admin = table.get("secret"), table.get("admin", False)
    if not isinstance(secret, str) or not 1 <= len(secret) <= _SECRET_CHARS_MAX:
        raise ValueError(f"{where}: secret: expected a string of 1 to {_SECRET_CHARS_MAX} characters")
    if not isinstance(is_admin, bool):
        raise ValueError(f"{where}: admin: expected true or false")
    role, with_bodies = _role(where, table, is_admin=is_admin)
    given = [(kind, table.get(f"{kind}s", {})) for kind in (TOPIC, GROUP)]
    rules = tuple(rule for kind, each in given for rule in _rules(where, kind, each, is_operator=role == OPERATOR))
    if role == OPERATOR and not any(OPERATE in rule.actions for rule in rules):
        raise ValueError(f"{where}: role operator requires ADMIN on at least one topic or group")
    return AccessKey(
        name=name,
        secret=secret.encode(),
        is_admin=is_admin or role == ADMINISTRATOR,
        rules=rules,
        role=role,
        with_bodies=with_bodies,
    )


def _role(where: str, table: Mapping[str, Any], *, is_admin: bool) -> tuple[str, bool]:
    role, with_bodies = table.get("role", ADMINISTRATOR if is_admin else ""), table.get("bodies", False)
    if "role" in table and role not in ROLES:
        raise ValueError(f"{where}: unknown role {role!r:.40}; expected {', '.join(ROLES)}")
    if "admin" in table and "role" in table and is_admin != (role == ADMINISTRATOR):
        raise ValueError(f"{where}: admin and role contradict each other; remove admin")
    if not isinstance(with_bodies, bool):
        raise ValueError(f"{where}: bodies: expected true or false")
    if "bodies" in table and role in {"", ADMINISTRATOR}:
        raise ValueError(f"{where}: bodies requires role = viewer or operator")
    return role, with_bodies


def _rules(where: str, kind: str, table: object, *, is_operator: bool) -> list[AccessRule]:
    if not isinstance(table, dict):
        raise ValueError(f'{where}: {kind}s: expected a table such as {{ "orders-*" = "SUB" }}')
    rules = []
    for pattern, value in table.items():
        here = f"{where}: {kind}s: {pattern!r}"
        if not _PATTERN.fullmatch(pattern):
            raise ValueError(f"{here}: invalid pattern; allowed are letters, digits and % | _ - *")
        actions = frozenset(value.split("|")) if isinstance(value, str) else frozenset()
        if not actions or not actions <= ACTIONS[kind]:
            known = sorted(ACTIONS[kind])
            raise ValueError(f"{here}: expected {', '.join(known)}, or several, such as {'|'.join(known[:2])}")
        if ADMIN in actions and is_operator:
            actions |= {OPERATE}
        elif ADMIN in actions and kind == TOPIC:
            raise ValueError(f'{here}: ADMIN on a topic requires role = "operator"')
        rules.append(AccessRule(kind, pattern, actions))
    return rules


def _check_names(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise ValueError(f"{where + ': ' if where else ''}unknown key {name!r}; known: {', '.join(sorted(known))}")


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino  # a change of mode changes ctime only
