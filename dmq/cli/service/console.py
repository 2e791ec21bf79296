"""``dmq console``: the console in the browser, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.nouns import single
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.session.options import Session, with_session
from dmq.config.units import is_loopback, parse_address

app = single()

LISTEN_DEFAULT = "127.0.0.1:8082"


@app.command()
@with_session
def console(
    session: Session,
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Loopback address of the pages; port 0 is any free one.")
    ] = LISTEN_DEFAULT,
    read_only: Annotated[bool, typer.Option("--read-only", help="Offer no changes.")] = False,
    ends_with_stdin: Annotated[bool, typer.Option("--ends-with-stdin", hidden=True)] = False,
) -> None:
    """Serve the console until SIGTERM or Ctrl-C.

    The pages are about the daemon of --address or of the context. If the daemon requires access keys, each person
    signs in with one; the console uses no key of its own.
    """
    with refusing("--listen", listen):
        address = parse_address(listen)
    if not is_loopback(address.host):
        raise refused("a loopback address is expected, such as 127.0.0.1:8082", "--listen", given=listen)
    target = session.chosen().target()
    from dmq.console import ConsoleOptions, serve_console
    from dmq.errors import AddressInUse

    options = ConsoleOptions(target.address, target.tls, address, read_only, ends_with_stdin)
    try:
        serve_console(options, lambda url: session.show({"console": url}, f"console {url}"))
    except AddressInUse as error:
        raise CommandFailed(str(error), ExitCode.FAILURE) from error
