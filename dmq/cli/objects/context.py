"""``dmq context``: named daemons, in a file of this user. Does not contact a daemon."""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dmq.cli.bulk.confirm import is_terminal
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.session.completion import contexts
from dmq.cli.session.options import AddressOption, ConnectionOptions, Session, with_output, with_watch
from dmq.config.contexts import (
    ADDRESS_DEFAULT,
    Chosen,
    Context,
    Contexts,
    ContextUnknown,
    Said,
    changing,
    check_name,
    choose,
    load,
)
from dmq.config.units import parse_address

app = noun("context")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.", autocompletion=contexts)]


@app.command()
@with_output
def add(
    session: Session,
    *,
    name: NameArgument,
    address: AddressOption = None,
    options: ConnectionOptions,
    replacing: Annotated[bool, typer.Option("--replace", help="Replace an existing context.")] = False,
) -> None:
    """Add a named daemon with its address and credentials.

    The first context becomes the current one. Files are stored as paths. The secret of an --access-key is read from
    --secret-file or DMQ_SECRET_KEY, otherwise from a prompt or a pipe. It is then stored in the file of contexts,
    which only this user can read. No other environment variable is stored.
    """
    given = options.context()
    with refusing("NAME", name):
        check_name(name)
    with refusing("--address", address):
        where = str(parse_address(address or ADDRESS_DEFAULT))
    if given.secret_file is not None and not given.access_key:
        raise refused("a secret requires --access-key", "--secret-file")
    if (given.tls_cert is None) != (given.tls_key is None):
        raise refused("a client certificate and its key go together", "--tls-cert", "--tls-key")
    if not replacing and name in load().by_name:
        raise CommandFailed(f"context {name!r} exists; use --replace to replace it", ExitCode.USAGE)
    files: dict[str, Any] = {
        name: _kept(getattr(given, name), f"--{name.replace('_', '-')}")
        for name in ("tls_ca", "tls_cert", "tls_key", "secret_file")
    }
    context = replace(given, address=where, **files)
    if given.access_key and given.secret_file is None:
        context = replace(context, secret=_ask(given.access_key))
    choose(Said("option", context)).target()  # report invalid settings before they are stored
    with changing() as held:
        held[0] = held[0].holding(name, context)
        is_current = held[0].current == name
    text = f"context {name}: {where}" + (" (current)" if is_current else "")
    session.show({"name": name, "current": is_current, **context.shown()}, text)


@app.command()
@with_watch
@with_output
def ls(session: Session) -> None:
    """List the contexts, without secrets; a star marks the current one."""
    found = load()
    listed = [(name, name == found.current, each) for name, each in sorted(found.by_name.items())]
    session.show_table(
        [{"name": name, "current": is_current, **each.shown()} for name, is_current, each in listed],
        ("", "CONTEXT", "ADDRESS", "TLS", "ACCESS KEY"),
        (("*" * is_current, name, each.address, _tls_of(each), each.access_key) for name, is_current, each in listed),
    )


@app.command()
@with_output
def show(
    session: Session,
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the context.  [default: the effective settings]")
    ] = None,
) -> None:
    """Show a context, or the effective settings and their sources.

    Options before the words 'context show' are part of the effective settings. Secrets are not shown.
    """
    chosen = session.chosen() if name is None else _alone(name)
    shown = chosen.what.shown()
    shown.setdefault("address", ADDRESS_DEFAULT)
    sources = {each: chosen.sources.get(each, "default") for each in shown}
    order = [each.name for each in fields(Context) if each.name in shown]
    session.show_table(
        {each: {"value": shown[each], "source": sources[each]} for each in order},
        ("SETTING", "VALUE", "FROM"),
        [(each, shown[each], sources[each]) for each in order],
    )


@app.command()
@with_output
def use(session: Session, *, name: NameArgument) -> None:
    """Make a context the current one, the default of all commands."""
    with changing() as held:
        _known(held[0], name)
        held[0] = replace(held[0], current=name)
    session.show({"name": name, "current": True}, f"context {name} is the current one")


@app.command()
@with_output
def rm(session: Session, *, name: NameArgument) -> None:
    """Remove a context and its stored secret; files that it names remain."""
    with changing() as held:
        _known(held[0], name)
        was_current = held[0].current == name
        held[0] = held[0].without(name)
    text = f"context {name} removed" + ("; no context is current now" if was_current else "")
    session.show({"name": name, "removed": True}, text)


def _alone(name: str) -> Chosen:
    return choose(Said(f"context {name}", _known(load(), name)))


def _known(contexts: Contexts, name: str) -> Context:
    try:
        return contexts.get(name)
    except ContextUnknown as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error


def _kept(path: Path | None, option: str) -> Path | None:
    """Return an absolute path. Raise a usage error if the file does not exist."""
    if path is None:
        return None
    found = path.expanduser().absolute()
    if not found.is_file():
        raise refused("an existing file is expected", option, given=str(path))
    return found


def _ask(access_key: str) -> str:
    secret = os.environ.get("DMQ_SECRET_KEY", "")
    if not secret and is_terminal():
        secret = getpass.getpass(f"dmq: secret of access key {out.printable(access_key)}: ", stream=sys.stderr)
    elif not secret and not sys.stdin.isatty():
        secret = sys.stdin.readline()
    if not secret.strip():
        raise CommandFailed(
            "no secret was given: enter it, set DMQ_SECRET_KEY, or name a --secret-file", ExitCode.USAGE
        )
    return secret.strip()


def _tls_of(context: Context) -> str:
    tls = choose(Said("context", replace(context, access_key=""))).target().tls
    if tls is None:
        return "off"
    return "with a client certificate" if tls.certificate else "on"
