"""Settings of the hook, and the daemon of consumers, in environment variables.

    DMQ_SPOOL                                store in a spool in this folder
    DMQ_ADDRESS, DMQ_CONTEXT, ...            or in this daemon, selected as by the ``dmq`` command
    DMQ_HOOK_...                             options; docs/how-to/frameworks.md lists them

An unknown or invalid variable raises an error with its name, because a misspelt setting would have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from dmq.config.contexts import ContextError, Target, target_by
from dmq.config.units import parse_duration, parse_size
from retry import EnvironmentInvalid
from retry.hook import MODES, TIMEOUT_S_MAX, WORKERS_MAX
from retry.policy import MAX_ATTEMPTS_LIMIT, SPOOL_STEPS_MS, PolicyError, RetryPolicy, Table
from retry.sink import DelaySink

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPOOL: Final = "DMQ_SPOOL"
_PREFIX: Final = "DMQ_HOOK_"
_OVERFLOWS: Final = ("refuse", "block", "drop_newest", "drop_oldest")
_DURABILITIES: Final = ("disk", "process")
_COUNT_MAX: Final = 10**12


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{', '.join(allowed[:-1])} or {allowed[-1]} is expected")
        return text

    return read


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most} is expected")
        return int(text)

    return read


def _seconds(text: str) -> float:
    duration_ms = parse_duration(text)
    if not 0 < duration_ms <= TIMEOUT_S_MAX * 1000:
        raise ValueError("a duration longer than 0 and of a year at most is expected, such as 5s")
    return duration_ms / 1000


def _rate(text: str) -> float:
    return float(_whole(1, _COUNT_MAX)(text))


def _steps(text: str) -> Table:
    try:
        return Table(tuple(parse_duration(each) for each in text.split()))
    except PolicyError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        raise ValueError("durations separated by spaces are expected, such as '3s 30s 5m'") from None


# By the name of the variable after its prefix: the option, and its parser.
_OF_HOOK: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "MODE": ("mode", _one_of(MODES)),
    "WORKERS": ("workers_per_type", _whole(1, WORKERS_MAX)),
    "DRAIN_PER_S": ("drain_per_s", _rate),
    "OLDEST_MAX": ("oldest_max_s", _seconds),
    "KEEP_TIMEOUT": ("keep_timeout_s", _seconds),
    "CLOSE_TIMEOUT": ("close_timeout_s", _seconds),
}
_OF_POLICY: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "STEPS": ("backoff", _steps),
    "MAX_ATTEMPTS": ("max_attempts", _whole(1, MAX_ATTEMPTS_LIMIT)),
}
_OF_SPOOL: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "ENTRIES_MAX": ("entries_max", _whole(1, _COUNT_MAX)),
    "BYTES_MAX": ("bytes_max", parse_size),
    "OVERFLOW": ("overflow", _one_of(_OVERFLOWS)),
    "BLOCK": ("block_s", _seconds),
    "DURABILITY": ("durability", _one_of(_DURABILITIES)),
    "TRAIL": ("trail_path", str),
}
METRICS_DIR: Final = "DMQ_HOOK_METRICS_DIR"  # of ``WorkerHook``
_OWN: Final = frozenset({*_OF_HOOK, *_OF_POLICY, *_OF_SPOOL, METRICS_DIR.removeprefix(_PREFIX)})


def hook_described_by(environ: Mapping[str, str]) -> tuple[DelaySink, dict[str, Any]]:
    """Return the open sink that the variables select, and their options for ``Redelivery``.

    An empty variable counts as not set. Raise ``EnvironmentInvalid``, and the errors of opening a spool.
    """
    said = {name: value.strip() for name, value in environ.items() if name.startswith("DMQ_") and value.strip()}
    unknown = sorted(name for name in said if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _OWN)
    if unknown:
        known = ", ".join(f"{_PREFIX}{each}" for each in sorted(_OWN))
        raise EnvironmentInvalid(f"{unknown[0]} is not a setting of the hook; known: {known}")
    options = _read(said, _OF_HOOK)
    policy = _read(said, _OF_POLICY)
    if policy:
        backoff = policy.get("backoff", Table(SPOOL_STEPS_MS))
        attempts = policy.get("max_attempts", min(len(backoff.steps_ms) + 1, MAX_ATTEMPTS_LIMIT))
        options["policy"] = RetryPolicy(backoff=backoff, max_attempts=attempts, jitter=0.1)
    of_spool = _read(said, _OF_SPOOL)
    if _SPOOL in said:
        return _spool(said[_SPOOL], of_spool), options
    if of_spool:
        name = next(f"{_PREFIX}{each}" for each, (option, _) in _OF_SPOOL.items() if option in of_spool)
        raise EnvironmentInvalid(f"{name} is {said[name]!r:.80}, but requires a spool: set {_SPOOL} to its folder")
    if not (said.get("DMQ_ADDRESS") or said.get("DMQ_CONTEXT")):
        raise EnvironmentInvalid(
            f"no sink for the hook: set {_SPOOL} to a folder, or DMQ_ADDRESS or DMQ_CONTEXT to a daemon"
        )
    return _daemon(said), options


def target_described_by(environ: Mapping[str, str]) -> Target:
    """Return the daemon that the variables select, as the ``dmq`` command does. Raise ``EnvironmentInvalid``."""
    with _invalid():
        return target_by(environ)


def _spool(folder: str, options: dict[str, Any]) -> DelaySink:
    from dmq.producer_store import Spool, SpoolOptions

    return Spool(folder, options=SpoolOptions(**options))


def _daemon(said: Mapping[str, str]) -> DelaySink:
    target = target_described_by(said)
    from dmq.client import SidecarClient

    with _invalid():
        return SidecarClient(target.address, access_key=target.access_key, secret_key=target.secret, tls=target.tls)


@contextmanager
def _invalid() -> Iterator[None]:
    try:
        yield
    except ContextError as error:
        raise EnvironmentInvalid(str(error)) from error


def _read(said: Mapping[str, str], known: Mapping[str, tuple[str, Callable[[str], Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each, (option, read) in known.items():
        text = said.get(f"{_PREFIX}{each}")
        if text is None:
            continue
        try:
            found[option] = read(text)
        except ValueError as error:
            raise EnvironmentInvalid(f"{_PREFIX}{each} is {text!r:.80}: {error}") from None
    return found
