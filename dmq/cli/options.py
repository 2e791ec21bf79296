"""What several commands take: the session with its options, and arguments that mean the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.errors import CommandFailed, ExitCode, refused, refusing
from dmq.units import parse_address, parse_duration

if TYPE_CHECKING:
    from broker_adapter.signature import Signer
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

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
MessageIdsOption = Annotated[
    list[str] | None, typer.Option("--id", metavar="MESSAGE_ID", help="Message id; may be repeated.")
]
KeysOption = Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="With this key; may be repeated.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Maximum number of rows.")]
OutFileOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Output file, written whole or not at all.  [default: stdout]"),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation, which needs a terminal.")]


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
        with refusing("--address", address):
            address = self.address if address is None else str(parse_address(address))
        with refusing("--timeout", timeout):
            timeout_s = self.timeout_s if timeout is None else parse_duration(timeout) / 1000
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
        from broker_adapter.signature import Signer

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


_COMMON = {"address": AddressOption, "output": OutputOption, "timeout": TimeoutOption}


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command its session, and the options ``--address``, ``--output`` and ``--timeout`` behind its own.

    Its first parameter is the session; all others are by keyword.
    """
    return _with(command, _COMMON)


def with_output(command: Callable[..., None]) -> Callable[..., None]:
    """As ``with_session`` for a command that asks no daemon: of the options, ``--output`` alone."""
    return _with(command, {"output": OutputOption})


def with_timeout(command: Callable[..., None]) -> Callable[..., None]:
    """As ``with_session`` for a command that asks somebody else than the daemon: without ``--address``."""
    return _with(command, {"output": OutputOption, "timeout": TimeoutOption})


def _with(command: Callable[..., None], common: Mapping[str, object]) -> Callable[..., None]:
    parameters = [
        Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *list(signature(command, eval_str=True).parameters.values())[1:],
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=each) for name, each in common.items()),
    ]

    @wraps(command)
    def run(ctx: typer.Context, **given: Any) -> None:  # noqa: ANN401 - what the parser made of the options
        command(session_of(ctx, **{name: given.pop(name) for name in common}), **given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what typer looks at
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def properties_of(texts: list[str] | None) -> dict[str, str]:
    """Return user properties from KEY=VALUE each; a usage error for what is none."""
    properties: dict[str, str] = {}
    for text in texts or []:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise refused("KEY=VALUE is expected", "--property", given=text)
        properties[name] = value
    return properties
