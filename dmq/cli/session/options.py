"""Shared options of commands: the session with its options, and arguments with the same meaning everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.output.watch import INTERVAL_DEFAULT, interval_s, repeat
from dmq.cli.session.completion import contexts, groups, topics
from dmq.config.contexts import (
    ADDRESS_DEFAULT,
    CONTEXT_VARIABLE,
    Chosen,
    Context,
    ContextUnknown,
    Said,
    Target,
    choose,
    load,
    said_by,
)
from dmq.config.units import parse_address, parse_duration

if TYPE_CHECKING:
    from broker_adapter.wire.signature import Signer
    from dmq.admin.client import AdminClient

TIMEOUT_S_DEFAULT = 5.0
WHY_CHARS_MAX = 200


class Output(StrEnum):
    """Output format: for people, or for programs (stable keys)."""

    TABLE = "table"
    JSON = "json"


# The same before and after the command, so that both `dmq -o json status` and `dmq status -o json` work.
_ADDRESS_HELP = f"Address of the daemon.  [env var: DMQ_ADDRESS; default: {ADDRESS_DEFAULT}]"
AddressOption = Annotated[str | None, typer.Option("--address", "-a", help=_ADDRESS_HELP)]
OutputOption = Annotated[Output | None, typer.Option("--output", "-o", help="Output format.  [default: table]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Same as -o json.")]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Named daemon, see 'dmq context'.  [env var: DMQ_CONTEXT; default: the current one]",
        autocompletion=contexts,
    ),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option("--timeout", help="Timeout of each call, such as 500ms.  [env var: DMQ_TIMEOUT; default: 5s]"),
]

WhyOption = Annotated[
    str | None, typer.Option("--why", metavar="TEXT", help="Reason, kept in 'dmq activity' and the audit trail.")
]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", autocompletion=topics)]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.", autocompletion=groups)]
MessageIdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[MESSAGE_ID]...", help="Only these messages.", show_default=False)
]
MessageIdsOption = Annotated[
    list[str] | None, typer.Option("--id", metavar="MESSAGE_ID", help="Message id; may be repeated.")
]
KeysOption = Annotated[
    list[str] | None, typer.Option("--key", metavar="KEY", help="Only messages with this key; may be repeated.")
]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of rows.")]
AfterOption = Annotated[
    str,
    typer.Option(
        "--after", metavar="CURSOR", help="Continue after the end of a previous list, which printed this token."
    ),
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return at once; the job continues in the daemon.")]
RateOption = Annotated[
    float | None, typer.Option(metavar="N", help="Maximum rate, in messages per second.  [default: unlimited]")
]
OutFileOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Output file, written whole or not at all.  [default: stdout]"),
]
IntervalOption = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help=f"Time between two refreshes.  [default: {INTERVAL_DEFAULT}]"),
]
_WatchOption = Annotated[
    bool, typer.Option("--watch", "-w", help="Repeat the list until Ctrl-C or q; with -o json, one line each time.")
]
BodyOption = Annotated[bool, typer.Option("--body", help="Include the body (base64 in JSON).")]
UnmaskedOption = Annotated[
    bool, typer.Option("--unmasked", help="Without the masks of the setting redact. Needs an admin key; recorded.")
]


class OptionGroup:
    """Base of dataclasses with a field per option. A command has one as a single parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(OptionGroup):
    """Options of a command that shows or asks before it changes many items."""

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes and their number without making them.")
    ] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation, which needs a terminal.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions(OptionGroup):
    """Options of a message to send."""

    tag: Annotated[str, typer.Option(help="Tag, one word to filter by.")] = ""
    key: Annotated[list[str] | None, typer.Option(help="Key, a word to look up by; may be repeated.")] = None
    group: Annotated[str, typer.Option(help="Message group; messages of one group keep their order.")] = ""
    prop: Annotated[
        list[str] | None, typer.Option("--property", metavar="KEY=VALUE", help="User property; may be repeated.")
    ] = None

    def properties(self) -> dict[str, str]:
        """Return the user properties. Raise a usage error for an invalid one."""
        properties: dict[str, str] = {}
        for text in self.prop or []:
            name, separator, value = text.partition("=")
            if not separator or not name:
                raise refused("KEY=VALUE is expected", "--property", given=text)
            properties[name] = value
        return properties


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions(OptionGroup):
    """Options for TLS and the access key."""

    access_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Access key; its secret is in DMQ_SECRET_KEY.  [env var: DMQ_ACCESS_KEY]"),
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that holds the secret.  [env var: DMQ_SECRET_FILE]")
    ] = None
    tls: Annotated[bool | None, typer.Option(help="Use TLS.  [default: if a TLS option is set]")] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate of the trusted authority.  [env var: DMQ_TLS_CA]"),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Client certificate, for a daemon that requires one.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of the client certificate.")] = None
    tls_server_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name in the daemon's certificate, if different from the host name."),
    ] = None

    def context(self) -> Context:
        """Return the options as settings of a context."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return Context(**{name: value for name, value in given.items() if value is not None})


def _timeout_s() -> float:
    """Return the timeout of the environment, or the default one."""
    text = os.environ.get("DMQ_TIMEOUT")
    if not text:
        return TIMEOUT_S_DEFAULT
    with refusing("DMQ_TIMEOUT", text):
        return parse_duration(text) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Common options of one command."""

    given: Context = field(default_factory=Context)  # from options
    context: str | None = None
    output: Output = Output.TABLE
    timeout_s: float = field(default_factory=_timeout_s)
    why: str = ""

    def but(
        self,
        address: str | None = None,
        output: Output | None = None,
        timeout: str | None = None,
        context: str | None = None,
        why: str | None = None,
        *,
        json: bool = False,
    ) -> Session:
        """Return this session with the given options replaced. Raise a usage error for invalid values."""
        if json and output not in {None, Output.JSON}:
            raise refused("it is the same as -o json", "--json", "--output")
        with refusing("--address", address):
            given = self.given if address is None else replace(self.given, address=str(parse_address(address)))
        with refusing("--timeout", timeout):
            timeout_s = self.timeout_s if timeout is None else parse_duration(timeout) / 1000
        return replace(
            self,
            given=given,
            context=self.context if context is None else context,
            output=Output.JSON if json else output or self.output,
            timeout_s=timeout_s,
            why=self.why if why is None else _check_why(why),
        )

    @property
    def as_json(self) -> bool:
        """True if the output is for a program."""
        return self.output is Output.JSON

    def show(self, value: object, text: Callable[[], object] | str) -> None:
        """Print ``value`` as JSON for a program, else ``text``, or call it to print for people."""
        if self.as_json:
            out.show_json(value)
        elif isinstance(text, str):
            typer.echo(out.printable(text))
        else:
            text()

    def show_facts(self, value: object, facts: Iterable[tuple[str, str]]) -> None:
        """Print ``value`` as JSON, or facts."""
        self.show(value, lambda: out.show_facts(facts))

    def show_table(
        self,
        value: object,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        numbers: Sequence[str] = (),
        details: Sequence[str] = (),
    ) -> None:
        """Print ``value`` as JSON, or a table; see ``output.show_table``."""
        self.show(value, lambda: out.show_table(headings, rows, numbers=numbers, details=details))

    def chosen(self) -> Chosen:
        """Return the effective settings of options, environment and context, with their sources, or raise a usage
        error.
        """
        try:
            return _chosen(self.given, self.context)
        except ContextUnknown as error:
            raise CommandFailed(f"{error}; create it with 'dmq context add'", ExitCode.USAGE) from error

    @contextmanager
    def connect(self) -> Iterator[AdminClient]:
        """Yield a client of the daemon; its errors end the command with the right exit code."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC logs of a handshake are replaced by one line of ours
        from dmq.admin.client import (
            AdminClient,
            CallFailed,
            CallRefused,
            DaemonUnavailable,
            NotAllowed,
            NotFound,
        )

        target = self.chosen().target()
        signer = _signer(target)
        with AdminClient(
            target.address, timeout_s=self.timeout_s, signer=signer, tls=target.tls, why=self.why
        ) as client:
            try:
                yield client
            except NotAllowed as error:
                hint = f"; {_GIVE_A_KEY}" if signer is None else ""
                raise CommandFailed(f"{error}{hint}", ExitCode.NOT_ALLOWED) from error
            except DaemonUnavailable as error:
                raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error
            except NotFound as error:
                raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
            except (CallRefused, CallFailed) as error:
                raise CommandFailed(str(error)) from error


_GIVE_A_KEY = (
    "give an access key: --access-key KEY with its secret in DMQ_SECRET_KEY or --secret-file, "
    "or a context with both ('dmq context add')"
)


def _signer(target: Target) -> Signer | None:
    if not target.access_key:
        return None
    from broker_adapter.runtime.clock import SystemClock
    from broker_adapter.wire.signature import Signer

    return Signer(target.access_key, target.secret, SystemClock())


def _chosen(given: Context, named: str | None) -> Chosen:
    environment = _environment()
    options, variables = Said("option", given), Said("environment", environment)
    if named is None and (given.address or environment.address):
        return choose(options, variables)  # another daemon: it must not get the secrets of a context
    contexts = load()
    name = os.environ.get(CONTEXT_VARIABLE) or contexts.current if named is None else named
    if not name:
        return choose(options, variables)
    context = Said(f"context {name}", contexts.get(name))
    if named:  # set by an option, which overrides the environment
        return choose(options, context, variables)
    return choose(options, variables, context)


def _environment() -> Context:
    """Return the context of the environment. The secret is never an option, because arguments are visible to
    all users.
    """
    said = said_by(os.environ)
    with refusing("DMQ_ADDRESS", said.address):
        return replace(said, address=str(parse_address(said.address)) if said.address else "")


def _check_why(why: str) -> str:
    text = why.strip()
    if len(text) > WHY_CHARS_MAX or not text.isprintable():
        given = f"{text[:20]}..." if len(text) > WHY_CHARS_MAX else why
        raise refused(f"up to {WHY_CHARS_MAX} printable characters are expected", "--why", given=given)
    return text


def session_of(ctx: typer.Context, **given: Any) -> Session:  # noqa: ANN401 - what ``but`` takes
    """Return the global options, overridden by those given after the command."""
    session = ctx.find_object(Session)
    assert session is not None  # the root command sets it
    return session.but(**given)


_OUTPUT = {"output": OutputOption, "json": JsonOption}
_COMMON = {"address": AddressOption, "context": ContextOption, **_OUTPUT, "timeout": TimeoutOption}


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """Call a command with its session, and add the options ``--address``, ``--output`` etc. after its own.

    Its first parameter is the session; all others are by keyword.
    """
    return _with(command, _COMMON)


def with_reason(command: Callable[..., None]) -> Callable[..., None]:
    """Like ``with_session``, for a command with changes: adds ``--why``, the reason that is recorded with them."""
    return _with(command, {**_COMMON, "why": WhyOption})


def with_output(command: Callable[..., None]) -> Callable[..., None]:
    """Like ``with_session``, for a command that contacts no daemon: adds only ``--output``."""
    return _with(command, _OUTPUT)


def with_timeout(command: Callable[..., None]) -> Callable[..., None]:
    """Like ``with_session``, for a command that contacts another server than the daemon: without ``--address``."""
    return _with(command, {**_OUTPUT, "timeout": TimeoutOption})


def with_watch(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--watch`` to a list, which repeats it until Ctrl-C. It stands above the decorators of other options."""
    own = signature(command)

    @wraps(command)
    def run(
        ctx: typer.Context,
        *,
        watch: bool,
        interval: str | None,
        **given: Any,  # noqa: ANN401 - the command's
    ) -> None:
        if not watch:
            if interval is not None:
                raise refused("it requires --watch", "--interval")
            command(ctx, **given)
            return
        as_json = bool(given.get("json")) or "json" in {session_of(ctx).output, given.get("output")}
        seconds = interval_s(interval or INTERVAL_DEFAULT)
        repeat(lambda: command(ctx, **given), seconds, _command_line(ctx), as_json=as_json)

    added = (("watch", _WatchOption, False), ("interval", IntervalOption, None))
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=each) for name, each, default in added
    ]
    return _signed(run, [*own.parameters.values(), *options])


def _command_line(ctx: typer.Context) -> str:
    """Return the command with its arguments."""
    arguments = [each.name for each in ctx.command.params if each.param_type_name == "argument"]
    return " ".join([ctx.command_path, *(str(ctx.params[name]) for name in arguments if name and ctx.params.get(name))])


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Call a command with its option groups, each made of the options of its fields."""
    parameters: list[Parameter] = []
    groups: dict[str, type[OptionGroup]] = {}
    for each in signature(command, eval_str=True).parameters.values():
        if isinstance(each.annotation, type) and issubclass(each.annotation, OptionGroup):
            groups[each.name] = each.annotation
            parameters += signature(each.annotation, eval_str=True).parameters.values()
        else:
            parameters.append(each)

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:  # noqa: ANN401 - the command's
        made = {
            name: group(**{each: given.pop(each) for each in signature(group).parameters})
            for name, group in groups.items()
        }
        command(*args, **given, **made)

    return _signed(run, parameters)


def _with(command: Callable[..., None], common: Mapping[str, object]) -> Callable[..., None]:
    whole = with_options(command)
    parameters = [
        Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *list(signature(whole).parameters.values())[1:],
        *(
            Parameter(name, Parameter.KEYWORD_ONLY, default=False if name == "json" else None, annotation=each)
            for name, each in common.items()
        ),
    ]

    @wraps(command)
    def run(ctx: typer.Context, **given: Any) -> None:  # noqa: ANN401 - what the parser made of the options
        whole(session_of(ctx, **{name: given.pop(name) for name in common}), **given)

    return _signed(run, parameters)


def _signed(run: Callable[..., None], parameters: Sequence[Parameter]) -> Callable[..., None]:
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what typer looks at
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
