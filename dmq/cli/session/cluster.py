"""Options of commands that read an Apache RocketMQ cluster directly, over the classic protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.output.output import note
from dmq.cli.session.options import OptionGroup, Session, with_timeout

if TYPE_CHECKING:
    from broker_adapter.remoting import RemotingOptions, Survey

_T = TypeVar("_T")

NamesOption = Annotated[
    str,
    typer.Option("--namesrv", envvar="DMQ_NAMESRV", metavar="HOST:PORT;...", help="Name servers of the cluster."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess(OptionGroup):
    """Options for the access key and TLS of a cluster."""

    cluster_access_key: Annotated[
        str | None,
        typer.Option(
            envvar="DMQ_CLUSTER_ACCESS_KEY",
            metavar="KEY",
            help="Access key for the cluster; its secret is in DMQ_CLUSTER_SECRET_KEY.",
        ),
    ] = None
    cluster_tls: Annotated[bool, typer.Option("--cluster-tls", help="Use TLS with the cluster.")] = False
    cluster_tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificates to trust, instead of the system's.")
    ] = None

    def remoting(self, names: str, option: str) -> RemotingOptions:
        """Return the connection options of the cluster with these name servers. Raise a usage error if they are
        invalid.
        """
        from broker_adapter.contracts.endpoints import parse_endpoints
        from broker_adapter.remoting import RemotingOptions

        with refusing(option, names):
            addresses = parse_endpoints(names)
        key, ca = self.cluster_access_key or "", self.cluster_tls_ca
        secret = os.environ.get("DMQ_CLUSTER_SECRET_KEY", "") if key else ""
        if key and not secret:
            text = f"there is no secret for access key {key}: set DMQ_CLUSTER_SECRET_KEY"
            raise CommandFailed(text, ExitCode.USAGE)
        if ca is not None and not ca.is_file():
            raise refused("a file with certificates is expected", "--cluster-tls-ca", given=str(ca))
        return RemotingOptions(names=addresses, access_key=key, secret_key=secret, tls=self.cluster_tls, tls_ca=ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuery:
    """Cluster that a command queries. ``silent`` holds the brokers without an answer, with the reason."""

    options: RemotingOptions
    silent: dict[str, str] = field(default_factory=dict)

    def ask(self, ask: Callable[[Survey], Awaitable[_T]]) -> _T:
        """Return the result of the query; end the command if no broker answers."""
        from broker_adapter.remoting import RemotingAdmin, Survey

        async def asked() -> _T:
            async with RemotingAdmin(self.options) as admin:
                survey = Survey(admin)
                found = await ask(survey)
            self.silent.update(survey.silent)
            return found

        with asking_cluster():
            return asyncio.run(asked())


def with_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Call a command with its session and a cluster, from options added after its own; no daemon is contacted.

    These are its first two parameters; all others are by keyword. If brokers are left out of the answer, stderr names
    them and the command ends as unavailable, because a lag without them is unreliable.
    """

    @wraps(command)
    def run(session: Session, *, namesrv: str, access: ClusterAccess, **given: Any) -> None:  # noqa: ANN401 - the command's
        timeout_ms = max(1, round(session.timeout_s * 1000))
        options = replace(access.remoting(namesrv, "--namesrv"), request_timeout_ms=timeout_ms)
        cluster = ClusterQuery(options=options)
        command(session, cluster, **given)
        for broker, why in sorted(cluster.silent.items()):
            note(f"broker {broker} is left out: {why}")
        if cluster.silent:
            raise typer.Exit(ExitCode.UNAVAILABLE)

    own = signature(command, eval_str=True)
    first, _, *others = own.parameters.values()
    common = {"namesrv": NamesOption, "access": ClusterAccess}
    added = (Parameter(name, Parameter.KEYWORD_ONLY, annotation=each) for name, each in common.items())
    run.__signature__ = own.replace(parameters=[first, *others, *added])  # type: ignore[attr-defined]  # as options.py does
    return with_timeout(run)


@contextmanager
def asking_cluster() -> Iterator[None]:
    """End the command with the right exit code if the cluster refuses or does not answer."""
    from broker_adapter.contracts.errors import BrokerError, Refused, Rule

    try:
        yield
    except Refused as error:
        codes = {
            Rule.TOPIC_UNKNOWN: ExitCode.NOT_FOUND,
            Rule.GROUP_UNKNOWN: ExitCode.NOT_FOUND,
            Rule.UNAUTHORIZED: ExitCode.NOT_ALLOWED,
            Rule.FORBIDDEN: ExitCode.NOT_ALLOWED,
        }
        raise CommandFailed(str(error), codes.get(error.rule, ExitCode.FAILURE)) from error
    except BrokerError as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
