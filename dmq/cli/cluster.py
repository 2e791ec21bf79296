"""Options of commands that read an Apache RocketMQ cluster themselves, over the classic protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.errors import CommandFailed, ExitCode, refused, refusing

if TYPE_CHECKING:
    from broker_adapter.remoting import RemotingOptions

ClusterKeyOption = Annotated[
    str | None,
    typer.Option(
        "--cluster-access-key",
        envvar="DMQ_CLUSTER_ACCESS_KEY",
        metavar="KEY",
        help="Access key for the cluster; its secret: DMQ_CLUSTER_SECRET_KEY.",
    ),
]
ClusterTlsOption = Annotated[bool, typer.Option("--cluster-tls", help="Speak TLS with the cluster.")]
ClusterCaOption = Annotated[
    Path | None,
    typer.Option("--cluster-tls-ca", metavar="FILE", help="Certificates to trust, instead of the system's."),
]


def remoting_of(names: str, option: str, access_key: str | None, ca: Path | None, *, tls: bool) -> RemotingOptions:
    """Return how to reach the cluster with these name servers; a usage error says what is wrong."""
    from broker_adapter.endpoints import parse_endpoints
    from broker_adapter.remoting import RemotingOptions

    with refusing(option, names):
        addresses = parse_endpoints(names)
    secret = os.environ.get("DMQ_CLUSTER_SECRET_KEY", "") if access_key else ""
    if access_key and not secret:
        text = f"there is no secret for access key {access_key}: set DMQ_CLUSTER_SECRET_KEY"
        raise CommandFailed(text, ExitCode.USAGE)
    if ca is not None and not ca.is_file():
        raise refused("a file with certificates is expected", "--cluster-tls-ca", given=str(ca))
    return RemotingOptions(names=addresses, access_key=access_key or "", secret_key=secret, tls=tls, tls_ca=ca)


@contextmanager
def asking_cluster() -> Iterator[None]:
    """End the command with the code that fits when the cluster refuses or does not answer."""
    from broker_adapter.errors import BrokerError, Refused, Rule

    try:
        yield
    except Refused as error:
        codes = {
            Rule.TOPIC_UNKNOWN: ExitCode.NOT_FOUND,
            Rule.UNAUTHORIZED: ExitCode.NOT_ALLOWED,
            Rule.FORBIDDEN: ExitCode.NOT_ALLOWED,
        }
        raise CommandFailed(str(error), codes.get(error.rule, ExitCode.FAILURE)) from error
    except BrokerError as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
