"""``dmq http-api``: run the HTTP API for a daemon, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.nouns import single
from dmq.cli.service.web import CertificateKeyOption, CertificateOption, listening
from dmq.cli.session.options import AddressOption, ContextOption, session_of, with_options

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
    certificate: CertificateOption = None,
    certificate_key: CertificateKeyOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on external addresses without access keys and TLS.")
    ] = False,
) -> None:
    """Run the HTTP API for a daemon until SIGTERM or Ctrl-C.

    The API calls the daemon with the access key of each request, and has no key of its own. 'dmq serve --http-api
    HOST:PORT' starts it together with the daemon.
    """
    session = session_of(ctx, address=address, context=context)
    target = session.chosen().target()
    sockets, tls = listening(
        *(listen, target, session.timeout_s, certificate, certificate_key),
        insecure=insecure,
        hint=", or add --insecure",
    )
    from broker_adapter.runtime.clock import SystemClock
    from dmq.http_api import run
    from dmq.runtime.log import configure
    from dmq.runtime.web_server import url_of

    configure("info", "auto", SystemClock())
    session.show({"http_api": url_of(sockets, tls)}, f"http-api {url_of(sockets, tls)}")
    run(sockets, target.address, client_tls=target.tls, tls=tls)
