"""``dmq acl``: the file of access keys. Works without a daemon; a daemon reloads the file when it changes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.nouns import noun
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.session.options import Session, with_output, with_watch

if TYPE_CHECKING:
    from dmq.acl.file import Keys
    from dmq.acl.rules import AccessKey, AccessRule, Need

app = noun("acl")

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="File of access keys.  [default: setting `acl` of the configuration]"
    ),
]
_BARE_TOML_KEY = re.compile(r"[A-Za-z0-9_-]+")


@app.command()
@with_watch
@with_output
def ls(session: Session, *, file: FileOption = None) -> None:
    """List the access keys and their rules, without their secrets."""
    keys = list(_read(file).by_name.values())
    plain = [
        {
            "access_key": key.name,
            "is_admin": key.is_admin,
            "role": key.role,
            "with_bodies": key.with_bodies or key.is_admin,
            "rules": [_plain(rule) for rule in key.rules],
        }
        for key in keys
    ]
    session.show_table(plain, ("ACCESS KEY", "ROLE", "RULE"), (row for key in keys for row in _rows(key)))


@app.command()
@with_output
def check(
    session: Session,
    *,
    access_key: Annotated[str, typer.Argument(metavar="ACCESS_KEY", help="The access key.")],
    action: Annotated[str, typer.Argument(metavar="ACTION", help="PUB, SUB or ADMIN.")],
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="topic:NAME or group:NAME.")],
    file: FileOption = None,
) -> None:
    """Check a permission of a key and show the rule; exit with 5 if denied."""
    need = _need(action, resource)
    key = _read(file).by_name.get(access_key)
    if key is None:
        raise CommandFailed(f"there is no access key {access_key}", ExitCode.NOT_FOUND)
    rule = key.rule_for(need)
    found = _plain(rule) if rule is not None else None
    session.show({"is_allowed": key.may(need), "is_admin": key.is_admin, "rule": found}, _verdict(key, need, rule))
    if not key.may(need):
        raise typer.Exit(ExitCode.NOT_ALLOWED)


@app.command()
@with_output
def new(
    session: Session,
    *,
    access_key: Annotated[
        str | None, typer.Argument(metavar="[ACCESS_KEY]", help="Name of the key.  [default: generated]")
    ] = None,
) -> None:
    """Print a new access key and secret for the file; store nothing."""
    from dmq.acl.file import is_access_key

    name = secrets.token_hex(10).upper() if access_key is None else access_key
    if not is_access_key(name):
        raise refused("1 to 128 visible ASCII characters except , and / are expected", "ACCESS_KEY", given=name)
    secret = secrets.token_urlsafe(30)
    table = name if _BARE_TOML_KEY.fullmatch(name) else json.dumps(name)
    text = f'[keys.{table}]\nsecret = "{secret}"\ntopics = {{ }}\ngroups = {{ }}'
    session.show({"access_key": name, "secret_key": secret}, lambda: typer.echo(text))


def _read(file: Path | None) -> Keys:
    from dmq.acl.file import read

    if file is None:
        from dmq.config.settings import ConfigError, load

        try:
            file = load().acl
        except ConfigError as error:
            raise CommandFailed(str(error), ExitCode.USAGE) from error
    if file is None:
        raise CommandFailed("no file of access keys is configured: name one with --file, or set acl", ExitCode.USAGE)
    return read(file)


def _need(action: str, resource: str) -> Need:
    from dmq.acl.rules import ACTIONS, Need

    kind, separator, name = resource.partition(":")
    if kind not in ACTIONS or not separator or not name:
        raise refused("topic:NAME or group:NAME is expected", "RESOURCE", given=resource)
    if action not in ACTIONS[kind]:
        known = ", ".join(sorted(ACTIONS[kind]))
        raise refused(f"with a {kind}, one of {known} is expected", "ACTION", given=action)
    return Need(action, kind, name)


def _plain(rule: AccessRule) -> dict[str, object]:
    return {"kind": rule.kind, "pattern": rule.pattern, "actions": rule.written}


def _verdict(key: AccessKey, need: Need, rule: AccessRule | None) -> str:
    if key.is_admin:
        return "allowed: it is an admin key"
    return f"not allowed: no rule gives {need}" if rule is None else f"allowed by {rule}"


def _rows(key: AccessKey) -> Iterator[tuple[str, str, str]]:
    """Yield one row per rule; the key is named in its first row."""
    name, role = key.name, key.role + (", with bodies" if key.with_bodies else "")
    for rule in key.rules or ("",):
        yield name, role, str(rule)
        name = role = ""
