"""Options of every command that talks to a daemon: its address, the output format, the timeout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.errors import CommandFailed, ExitCode
from dmq.units import parse_address, parse_duration

if TYPE_CHECKING:
    from dmq.acl.signature import Signer
    from dmq.admin.client import AdminClient

ADDRESS_DEFAULT = "127.0.0.1:8081"
TIMEOUT_S_DEFAULT = 5.0


class Output(StrEnum):
    """How a command answers: for people, or for programs (stable keys)."""

    TABLE = "table"
    JSON = "json"


# The same three before and after the command, so that both `dmq -o json status` and `dmq status -o json` work.
_ADDRESS_HELP = f"Address of the daemon.  [default: {ADDRESS_DEFAULT}]"
RootAddressOption = Annotated[str | None, typer.Option("--address", "-a", envvar="DMQ_ADDRESS", help=_ADDRESS_HELP)]
# Without the variable: it would beat an address given before the command.
AddressOption = Annotated[str | None, typer.Option("--address", "-a", help=_ADDRESS_HELP)]
OutputOption = Annotated[Output | None, typer.Option("--output", "-o", help="Output format.  [default: table]")]
AccessKeyOption = Annotated[
    str | None,
    typer.Option(
        "--access-key", envvar="DMQ_ACCESS_KEY", metavar="KEY", help="Access key; its secret: DMQ_SECRET_KEY."
    ),
]
SecretFileOption = Annotated[
    Path | None,
    typer.Option("--secret-file", envvar="DMQ_SECRET_FILE", metavar="FILE", help="File that holds the secret."),
]
TimeoutOption = Annotated[
    str | None, typer.Option("--timeout", help="Timeout of each call, such as 500ms.  [default: 5s]")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The common options, as they hold for one command."""

    address: str = ADDRESS_DEFAULT
    output: Output = Output.TABLE
    timeout_s: float = TIMEOUT_S_DEFAULT
    access_key: str = ""
    secret_file: Path | None = None

    def but(self, address: str | None, output: Output | None, timeout: str | None) -> Session:
        """Return this session with what was given instead; a usage error for what cannot be read."""
        try:
            address = self.address if address is None else str(parse_address(address))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--address") from error
        try:
            timeout_s = self.timeout_s if timeout is None else parse_duration(timeout) / 1000
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--timeout") from error
        return replace(self, address=address, output=output or self.output, timeout_s=timeout_s)

    @property
    def as_json(self) -> bool:
        """Whether the answer is for a program."""
        return self.output is Output.JSON

    @contextmanager
    def connect(self) -> Iterator[AdminClient]:
        """Give a client of the daemon; its errors end the command with the code that fits."""
        from dmq.admin.client import AdminClient, CallFailed, CallRefused, DaemonUnavailable, NotAllowed, NotFound

        with AdminClient(self.address, timeout_s=self.timeout_s, signer=self._signer()) as client:
            try:
                yield client
            except NotAllowed as error:
                raise CommandFailed(str(error), ExitCode.NOT_ALLOWED) from error
            except DaemonUnavailable as error:
                raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
            except NotFound as error:
                raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
            except (CallRefused, CallFailed) as error:
                raise CommandFailed(str(error)) from error

    def _signer(self) -> Signer | None:
        """Return what signs the calls. The secret comes from a file or the environment: anybody can read arguments."""
        if not self.access_key:
            return None
        from broker_adapter.clock import SystemClock
        from dmq.acl.signature import Signer

        if self.secret_file is not None:
            secret = self.secret_file.read_text(encoding="utf-8").strip()
        else:
            secret = os.environ.get("DMQ_SECRET_KEY", "")
        if not secret:
            text = f"there is no secret for access key {self.access_key}: set DMQ_SECRET_KEY, or name a --secret-file"
            raise CommandFailed(text, ExitCode.USAGE)
        return Signer(self.access_key, secret, SystemClock())


def session_of(
    ctx: typer.Context, address: str | None = None, output: Output | None = None, timeout: str | None = None
) -> Session:
    """Return the global options with those given after the command in their place."""
    session = ctx.find_object(Session)
    assert session is not None  # the root command sets it
    return session.but(address, output, timeout)


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command its session, and the options ``--address``, ``--output`` and ``--timeout`` behind its own.

    Its first parameter is the session; all others are by keyword.
    """
    parameters = [
        Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *list(signature(command, eval_str=True).parameters.values())[1:],
        Parameter("address", Parameter.KEYWORD_ONLY, default=None, annotation=AddressOption),
        Parameter("output", Parameter.KEYWORD_ONLY, default=None, annotation=OutputOption),
        Parameter("timeout", Parameter.KEYWORD_ONLY, default=None, annotation=TimeoutOption),
    ]

    @wraps(command)
    def run(
        ctx: typer.Context, *, address: str | None, output: Output | None, timeout: str | None, **others: object
    ) -> None:
        command(session_of(ctx, address, output, timeout), **others)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what typer looks at
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
