"""``dmq http-api``: run the HTTP API for a daemon, in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from dmq.cli.nouns import single
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.session.options import AddressOption, ContextOption, session_of, with_options
from dmq.config.contexts import Target
from dmq.config.units import is_loopback, parse_address

LISTEN_DEFAULT = "127.0.0.1:8083"

app = single()


@app.command()
@with_options
def http_api(
    ctx: typer.Context,
    *,
    address: AddressOption = None,
    context: ContextOption = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the HTTP API.")] = LISTEN_DEFAULT,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate (PEM) for HTTPS, required beyond this host.")
    ] = None,
    certificate_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its private key (PEM).  [default: in the same file]")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on external addresses without access keys and TLS.")
    ] = False,
) -> None:
    """Run the HTTP API for a daemon until SIGTERM or Ctrl-C.

    It passes on the access keys of its callers, and has none of its own. 'dmq serve --http-api HOST:PORT' starts the
    same for its daemon.
    """
    with refusing("--listen", listen):
        place = parse_address(listen)
    session = session_of(ctx, address=address, context=context)
    target = session.chosen().target()
    if not insecure and not is_loopback(place.host):
        if certificate is None:
            raise refused("it is required beyond this host, or --insecure", "--certificate")
        _require_keys(target, session.timeout_s)
    from broker_adapter.runtime.clock import SystemClock
    from dmq.http2.listener import open_sockets
    from dmq.http_api import CertificateFiles, run
    from dmq.runtime.log import configure

    try:
        sockets = asyncio.run(open_sockets(place.host, place.port))
    except OSError as error:
        raise CommandFailed(f"cannot listen on {place}: {error.strerror or error}") from error
    configure("info", "auto", SystemClock())
    files = None if certificate is None else CertificateFiles(str(certificate), str(certificate_key or certificate))
    run(sockets, target.address, client_tls=target.tls, tls=files)


def _require_keys(target: Target, timeout_s: float) -> None:
    """Raise a usage error if the daemon serves callers without an access key."""
    from dmq.admin.client.client import AdminClient, NotAllowed

    with AdminClient(target.address, timeout_s=timeout_s, tls=target.tls) as client:
        try:
            client.status()
        except NotAllowed:
            return
    text = f"the daemon at {target.address} has no access keys: set acl, listen on 127.0.0.1, or add --insecure"
    raise CommandFailed(text, ExitCode.USAGE)
