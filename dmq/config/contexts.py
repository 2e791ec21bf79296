"""Contexts: named daemons with their connection settings in a file, and the effective settings of one command.

    {"version": 1, "current": "prod", "contexts": {"prod": {"address": "dmq.example:8081", "tls_ca": "...", ...}}}

The file is in the user's configuration folder, ``$XDG_CONFIG_HOME/dmq/contexts.json`` (``~/.config`` without the
variable). It may hold secrets, so only its owner may have access.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from dmq.config.units import parse_address
from dmq.errors import DmqError

ADDRESS_DEFAULT: Final = "127.0.0.1:8081"
CONTEXT_VARIABLE: Final = "DMQ_CONTEXT"
_VERSION: Final = 1
_BYTES_MAX: Final = 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PATHS: Final = ("tls_ca", "tls_cert", "tls_key", "secret_file")
_WORDS: Final = ("address", "tls_server_name", "access_key", "secret")


class ContextError(DmqError):
    """The file of contexts, or a file that a context names, cannot be used; the text gives the reason and never a
    secret.
    """


class ContextUnknown(ContextError):
    """There is no context with this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """TLS settings of a client: the trusted authorities (None: those of gRPC) and the client's own certificate."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""  # name in the daemon's certificate, if it differs from the address


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Connection settings of a daemon; empty or None if not set. ``repr`` shows no secrets."""

    address: str = ""
    tls: bool | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    access_key: str = ""
    secret: str = field(default="", repr=False)
    secret_file: Path | None = None

    def shown(self) -> dict[str, str]:
        """Return the settings by name, without the secret."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        said["secret"] = "stored" if self.secret else ""
        return {name: _written(value) for name, value in said.items() if value not in {None, ""}}


class Target(NamedTuple):
    """A daemon and its connection settings."""

    address: str = ADDRESS_DEFAULT
    tls: ClientTls | None = None
    access_key: str = ""
    secret: str = ""


class Said(NamedTuple):
    """Settings of one source, and the name of the source: ``option``, ``environment`` or ``context prod``."""

    source: str
    what: Context


class Chosen(NamedTuple):
    """Effective settings, and the source of each."""

    what: Context
    sources: Mapping[str, str]

    def target(self) -> Target:
        """Return the daemon to connect to. Raise ``ContextError`` if a secret is missing or unreadable."""
        what = self.what
        tls_is_meant = any((what.tls_ca, what.tls_cert, what.tls_key, what.tls_server_name))
        if what.tls is False or not (what.tls or tls_is_meant):
            tls = None
        else:
            if (what.tls_cert is None) != (what.tls_key is None):
                raise ContextError("a client certificate requires its key, and the reverse: --tls-cert and --tls-key")
            tls = ClientTls(
                ca=what.tls_ca, certificate=what.tls_cert, key=what.tls_key, server_name=what.tls_server_name
            )
        if not (what.access_key.isascii() and what.access_key.isprintable()):
            raise ContextError(f"invalid access key {what.access_key!r:.80}; expected printable ASCII characters")
        secret = _secret_of(what) if what.access_key else ""
        return Target(what.address or ADDRESS_DEFAULT, tls, what.access_key, secret)


def choose(*said: Said) -> Chosen:
    """Merge sources: each setting comes from the first source that has it.

    Settings that belong together come from one source: a client certificate with its key, an access key with its
    secret. A secret is used with the access key of its own source, else the first whose source names no key.
    """
    made: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for names in (
        ("address",),
        ("tls", "tls_ca"),
        ("tls_cert", "tls_key"),
        ("tls_server_name",),
        ("access_key",),
    ):
        for source, what in said:
            found = {name: getattr(what, name) for name in names if getattr(what, name) not in {None, ""}}
            if found:
                made |= found
                sources |= dict.fromkeys(found, source)
                break
    for source, what in _by_secret(said, made.get("access_key", "")):
        if what.secret_file is not None or what.secret:
            name = "secret" if what.secret_file is None else "secret_file"
            made[name], sources[name] = getattr(what, name), source
            break
    return Chosen(Context(**made), sources)


def _by_secret(said: tuple[Said, ...], access_key: str) -> list[Said]:
    """Sort sources by their match with the access key: those with this key, then those without any."""
    if not access_key:
        return []
    own = [each for each in said if each.what.access_key == access_key]
    return own + [each for each in said if not each.what.access_key]


def _secret_of(what: Context) -> str:
    if what.secret_file is not None:
        try:
            secret = what.secret_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not in UTF-8"
            raise ContextError(f"the file of the secret {what.secret_file} cannot be read: {why}") from error
        if not secret:
            raise ContextError(f"the file of the secret {what.secret_file} is empty")
        return secret
    if not what.secret:
        text = f"there is no secret for access key {what.access_key}: set DMQ_SECRET_KEY, or name a --secret-file"
        raise ContextError(text)
    return what.secret


def said_by(environ: Mapping[str, str]) -> Context:
    """Return the settings in environment variables, with the address unparsed."""
    ca, certificate, key, secret_file = (
        environ.get(name, "") for name in ("DMQ_TLS_CA", "DMQ_TLS_CLIENT_CERT", "DMQ_TLS_CLIENT_KEY", "DMQ_SECRET_FILE")
    )
    return Context(
        address=environ.get("DMQ_ADDRESS", ""),
        tls_ca=Path(ca) if ca else None,
        tls_cert=Path(certificate) if certificate else None,
        tls_key=Path(key) if key else None,
        tls_server_name=environ.get("DMQ_TLS_SERVER_NAME", ""),
        access_key=environ.get("DMQ_ACCESS_KEY", ""),
        secret=environ.get("DMQ_SECRET_KEY", ""),
        secret_file=Path(secret_file) if secret_file else None,
    )


def target_by(environ: Mapping[str, str]) -> Target:
    """Return the daemon in the environment variables, or else of the current context. Raise ``ContextError``.

    With an address no context is used, because its secrets are not for another daemon.
    """
    said = said_by(environ)
    if said.address:
        try:
            said = replace(said, address=str(parse_address(said.address)))
        except ValueError as error:
            raise ContextError(f"DMQ_ADDRESS is {said.address!r:.80}: {error}") from None
    variables = Said("environment", said)
    contexts = Contexts() if said.address else load()
    name = environ.get(CONTEXT_VARIABLE, "") or contexts.current
    if said.address or not name:
        return choose(variables).target()
    return choose(variables, Said(f"context {name}", contexts.get(name))).target()


def target_of(name: str = "") -> Target:
    """Return the daemon of the context ``name``; without a name, of ``DMQ_CONTEXT`` or else the current context."""
    contexts = load()
    name = name or os.environ.get(CONTEXT_VARIABLE, "") or contexts.current
    if not name:
        raise ContextError("no context is selected: name one, set DMQ_CONTEXT, or run 'dmq context use NAME'")
    return choose(Said(f"context {name}", contexts.get(name))).target()


# -- the file ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """Contents of the file. ``current`` may name a removed context."""

    current: str = ""
    by_name: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """Return a context. Raise ``ContextUnknown``."""
        found = self.by_name.get(name)
        if found is None:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise ContextUnknown(f"unknown context {name!r} in {path_of_file()}; known: {known}")
        return found

    def holding(self, name: str, context: Context) -> Contexts:
        """Return a copy with the context added or replaced; the first one becomes the current one."""
        return replace(self, by_name={**self.by_name, name: context}, current=self.current or name)

    def without(self, name: str) -> Contexts:
        """Return a copy without the context. Raise ``ContextUnknown``."""
        self.get(name)
        left = {each: context for each, context in self.by_name.items() if each != name}
        return replace(self, by_name=left, current="" if self.current == name else self.current)


def check_name(name: str) -> str:
    """Return ``name``. Raise ``ValueError`` if it is not a valid name of a context."""
    if not _NAME.fullmatch(name):
        raise ValueError("1 to 64 letters, digits and any of . _ - are expected")
    return name


def path_of_file() -> Path:
    """Return the path of the file of contexts, which may not exist."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    base = folder if folder.startswith("/") else os.path.expanduser("~/.config")  # noqa: PTH111 - without a home no error
    return Path(base, "dmq", "contexts.json")


def load(*, to_change: bool = False) -> Contexts:
    """Read the file; if it is missing, there are no contexts. Raise ``ContextError``.

    A file that this user may not access counts as missing, unless it is read ``to_change`` it.
    """
    path = path_of_file()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ContextError(
                    f"{path} may contain secrets and others can access it (mode {mode:04o}); run: chmod 600 {path}"
                )
            content = file.read(_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        if isinstance(error, PermissionError) and not to_change:
            return Contexts()
        raise ContextError(f"the file of contexts {path} cannot be read: {error.strerror}") from error
    if len(content) > _BYTES_MAX:
        raise ContextError(f"the file of contexts {path} is larger than {_BYTES_MAX} bytes")
    try:
        return _parse(json.loads(content))
    except (ValueError, RecursionError) as error:
        what = "no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else str(error)
        raise ContextError(f"the file of contexts {path} cannot be used: {what}") from None


@contextmanager
def changing() -> Iterator[list[Contexts]]:
    """Yield the contexts as the only item of a list. The item at the end of the block is stored durably and
    atomically.
    """
    path = path_of_file()
    if not path.is_absolute():
        raise ContextError("this user has no home directory; set XDG_CONFIG_HOME")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.parent / ".contexts.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ContextError(f"the folder {path.parent} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = [load(to_change=True)]
        yield held
        _write(path, held[0])
    finally:
        os.close(lock)


def _write(path: Path, contexts: Contexts) -> None:
    document = {
        "version": _VERSION,
        "current": contexts.current,
        "contexts": {name: _plain(each) for name, each in sorted(contexts.by_name.items())},
    }
    part = path.with_name(f".{path.name}.tmp")  # no other process writes it: the caller holds the lock
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ContextError(f"the file of contexts {path} cannot be written: {error.strerror}") from error


def _plain(context: Context) -> dict[str, object]:
    values = {each.name: getattr(context, each.name) for each in fields(context)}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if value not in {None, ""}
    }


def _parse(document: object) -> Contexts:
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(f"expected a JSON object with version {_VERSION}; a newer dmq may have written it")
    tables, current = document.get("contexts", {}), document.get("current", "")
    if not isinstance(tables, dict) or not isinstance(current, str):
        raise ValueError("expected an object 'contexts' and a name 'current'")
    return Contexts(current=current, by_name={name: _context(name, table) for name, table in tables.items()})


def _context(name: str, table: object) -> Context:
    if not _NAME.fullmatch(name) or not isinstance(table, dict):
        raise ValueError(f"context {name[:64]!r}: expected a name of letters and digits, and an object")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "tls" and isinstance(value, bool):
            values[key] = value
        elif key in _PATHS and isinstance(value, str):
            values[key] = Path(value)
        elif key in _WORDS and isinstance(value, str):
            values[key] = value
        else:
            raise ValueError(f"context {name!r}: {str(key)[:64]!r} is unknown or has an invalid value")
    if values.get("address"):
        try:
            parse_address(values["address"])
        except ValueError as error:
            raise ValueError(f"context {name!r}: address: {error}") from None
    return Context(**values)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
