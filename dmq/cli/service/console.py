"""``dmq console``: the console in the browser, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.nouns import single
from dmq.cli.service.web import CertificateKeyOption, CertificateOption, listening
from dmq.cli.session.options import Session, with_session

app = single()

LISTEN_DEFAULT = "127.0.0.1:8082"


@app.command()
@with_session
def console(
    session: Session,
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the pages; port 0 is any free one.")
    ] = LISTEN_DEFAULT,
    certificate: CertificateOption = None,
    certificate_key: CertificateKeyOption = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show all pages, and allow no changes.")] = False,
) -> None:
    """Serve the console until SIGTERM or Ctrl-C.

    The console shows the daemon of --address or of the context. If the daemon requires access keys, each person signs
    in with one; the console has no key of its own. An external --listen requires access keys and --certificate.
    """
    target = session.chosen().target()
    sockets, tls = listening(listen, target, session.timeout_s, certificate, certificate_key)
    from dmq.console import run
    from dmq.runtime.web_server import url_of

    session.show({"console": url_of(sockets, tls)}, f"console {url_of(sockets, tls)}")
    run(sockets, target.address, client_tls=target.tls, tls=tls, is_read_only=read_only)
