"""Configuration of the daemon: read once, checked as a whole, frozen.

A value comes from the first of: flag, environment variable ``DMQ_<KEY>``, TOML file, default. The file is the one named
by ``--config`` or ``DMQ_CONFIG``, else ``./dmq.toml`` if there is one. An unknown key is an error everywhere,
so that a misspelt setting is never a silent default.

Constructing ``DaemonConfig`` directly reads neither the environment nor a file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from broker_adapter.contracts.limits import BODY_BYTES_MAX, QUEUES_PER_TOPIC_DEFAULT, QUEUES_PER_TOPIC_MAX
from broker_adapter.runtime.extras import is_installed
from dmq.config.destinations import Destination, NotificationTopic, WebhookUrl, parse_destination
from dmq.config.redaction import RedactionRule, parse_redaction_rule
from dmq.config.units import (
    DELAY_LEVELS_DEFAULT,
    Address,
    TopicPatterns,
    format_delay_levels,
    format_duration,
    format_size,
    is_loopback,
    parse_address,
    parse_delay_levels,
    parse_duration,
    parse_size,
    parse_topic_patterns,
)

ENV_PREFIX = "DMQ_"
CONFIG_FILE_DEFAULT = "dmq.toml"
CONSOLE_DEFAULT = Address("127.0.0.1", 8082)  # of an automatic console
# The standard variable stands for otel_endpoint, if the extra is there: platforms set it for each of their containers.
OTEL_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Text of a key whose value is None.
_WRITTEN_NONE = {
    **dict.fromkeys(("metrics_listen", "http_api", "console"), "off"),
    **dict.fromkeys(("connections_max", "connections_per_address_max"), "auto"),
    **dict.fromkeys(("connection_idle", "delay_max", "keep_time", "keep_bytes", "tls_key", "tls_client_ca"), "none"),
    **dict.fromkeys(("backup_every", "backup_at"), "off"),
    "backup_dir": "none",
    **dict.fromkeys(("replica_url", "replica_link_ca"), "none"),
    "replica_link": "off",
    "otel_endpoint": "none",
    "replica_verify_every": "off",
    **dict.fromkeys(("topic_max_pending", "topic_max_pending_bytes", "topic_send_rate"), "none"),
    **dict.fromkeys(("cluster_access_key", "cluster_secret_key", "cluster_tls_ca"), "none"),
    "disk_low_water_bytes": "auto",
    "acl": "off",
    "clock_jump_max": "off",
    **dict.fromkeys(("on_dead_letter", "on_overdue", "webhook_secret_file"), "none"),
}
# Not read by the daemon, but by the command line, its shell completion, and tests.
_OTHER_VARIABLES = frozenset(
    {"DMQ_CONFIG", "DMQ_ADDRESS", "DMQ_CONTEXT", "DMQ_DEBUG", "DMQ_ACCESS_KEY", "DMQ_SECRET_KEY", "DMQ_SECRET_FILE"}
    | {
        "DMQ_TIMEOUT",
        "DMQ_COMPILED",
        "DMQ_TLS_CA",
        "DMQ_TLS_CLIENT_CERT",
        "DMQ_TLS_CLIENT_KEY",
        "DMQ_TLS_SERVER_NAME",
        "DMQ_SPOOL",
    }
)
_OTHER_PREFIXES = ("DMQ_TEST_", "DMQ_DEMO_", "DMQ_HOOK_")
# Variables that Kubernetes sets in each container for a Service in its namespace with a name that starts with dmq.
_SERVICE = re.compile(r"DMQ_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)")
_SERVICE_URL = re.compile(r"DMQ_(\w+_)?PORT=(tcp|udp|sctp)://.*")

_MIB = 2**20
PROCESSES_MAX = 64
# An eighth of the held bytes is reserved for operators; the rest has room for an answer of 13 MiB.
PROCESS_HELD_BYTES_MIN = 16 * _MIB
LOW_WATER_SHARE = 20  # a twentieth of the file system
LOW_WATER_BYTES_MIN = 32 * _MIB
LOW_WATER_BYTES_MAX = 1024 * _MIB
_VALUE_CHARS_MAX = 80
_WHOLE_MAX = 2**60  # of any number: values for stores and libraries, and sums of some, then fit into 64 bits
_NAME_BYTES_MAX = 255  # of Linux
_PATH_BYTES_MAX = 3840  # likewise, and room for the files of a store below it
_REPLICA_SCHEMES = ("s3", "gs", "az", "file")
_SWITCHES = frozenset({"auto", "off", "on", "none", "true", "false", "yes", "no"})


class ConfigError(Exception):
    """The configuration is invalid; ``problems`` has one line for each fault, with key, value and source.

    ``log_format`` is the configured format, so that the error is logged in it; ``auto`` if it is itself invalid.
    """

    def __init__(self, problems: list[str], log_format: object = "auto") -> None:
        super().__init__(*problems)
        self.problems = tuple(problems)
        self.log_format: Literal["auto", "json", "console"] = "auto"
        if log_format == "json" or log_format == "console":  # noqa: PLR1714 - which mypy does not narrow
            self.log_format = log_format

    def __str__(self) -> str:
        return "\n".join(self.problems)


def _duration(value: object) -> object:
    if isinstance(value, timedelta):
        return value
    return timedelta(milliseconds=parse_duration(str(value)))


def _whole(value: object) -> object:
    if isinstance(value, bool):  # TOML's `true` would be accepted as 1
        raise ValueError("a whole number is expected")
    return value


def fronts_max(held_bytes_max: int) -> int:
    """Return the number of front processes that may share ``held_bytes_max`` with the store process."""
    return held_bytes_max // PROCESS_HELD_BYTES_MIN - 1


def _processes(value: object) -> object:
    if value == "auto":
        return value
    with suppress(ValueError):
        if 1 <= (count := int(str(value))) <= PROCESSES_MAX:  # a text if it is from a variable or a flag
            return count
    raise ValueError(f"allowed: auto, or 1 to {PROCESSES_MAX}")


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else _whole(value)


def _or_none(word: str, read: Callable[[object], object]) -> BeforeValidator:
    """Validate a value with ``read``, except that ``word`` means None."""
    return BeforeValidator(lambda value: None if value is None or value == word else read(value))


def _path(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("a path is expected")
    if str(value).lower() in _SWITCHES:
        raise ValueError(f"a path is expected; if a file or folder has this name, write ./{value}")
    try:
        path = Path(value).expanduser()
    except RuntimeError:  # the only error of the library
        raise ValueError(f"{Path(value).parts[0]} names the home directory of an unknown user") from None
    if any(len(os.fsencode(name)) > _NAME_BYTES_MAX for name in path.parts) or len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ValueError(f"allowed: {_PATH_BYTES_MAX} bytes, and {_NAME_BYTES_MAX} of each name in it")
    return path


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for a loop of links, this one does not


def _path_or(*words: str) -> BeforeValidator:
    def read(value: object) -> object:
        if isinstance(value, str) and value in words:
            return value
        try:
            return _path(value)
        except ValueError as error:
            raise ValueError(f"allowed: {', '.join(words)}, or a path: {error}") from None

    return BeforeValidator(read)


def _text(value: object) -> object:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("a text is expected")
    return value


def _access_key(value: object) -> object:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value or " " in value:
        raise ValueError("a text of ASCII without spaces is expected")
    return value


def _secret(value: object) -> object:
    return value if isinstance(value, SecretStr) else SecretStr(str(_text(value)))


def _replica_url(value: object) -> object:
    """Check the form of the URL; the text of an error never shows it, since it may hold a password."""
    text = str(_text(value))
    try:
        parts = urlsplit(text)
        has_password = parts.username is not None or parts.password is not None
    except ValueError:
        raise ValueError("a URL is expected") from None
    if parts.scheme not in _REPLICA_SCHEMES or has_password or parts.query or parts.fragment:
        raise ValueError("a URL without credentials is expected: s3://, gs:// or az://BUCKET/PREFIX, or file:///PATH")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError("file:// needs an absolute path, such as file:///mnt/replica/orders")
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"{parts.scheme}:// needs the name of a bucket, such as {parts.scheme}://bucket/orders")
    return text.rstrip("/")


def _destination(value: object) -> object:
    return value if isinstance(value, Destination) else parse_destination(str(_text(value)))


def _otel_endpoint(value: object) -> object:
    """Check the form of the URL; the text of an error never shows it, since it may hold a password."""
    text = str(_text(value))
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        is_valid = is_valid and parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("the URL of a collector without credentials is expected, such as http://127.0.0.1:4318")
    return text.rstrip("/")


def _delay_levels(value: object) -> object:
    if isinstance(value, tuple):
        return value
    if not isinstance(value, str):
        raise ValueError("one string is expected, such as '1s 5s 10s'")
    return tuple(timedelta(milliseconds=level_ms) for level_ms in parse_delay_levels(value))


def _address(value: object) -> object:
    if isinstance(value, Address):
        return value
    return parse_address(str(value))


def _console(value: object) -> object:
    return value if value == "auto" else _address(value)


def _endpoints(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(_address(each) for each in value)
    if value == "none":
        return ()
    return tuple(parse_address(each) for each in str(value).replace(",", ";").split(";"))


def _topic_patterns(value: object) -> object:
    if isinstance(value, TopicPatterns):
        return value
    written = value if isinstance(value, (list, tuple)) else [value]
    names = [each for each in written if isinstance(each, str)]
    if len(names) < len(written):
        raise ValueError("expected topic names or prefixes, for example orders;bills*")
    return parse_topic_patterns(";".join(names))


def _redaction(value: object) -> object:
    written = value if isinstance(value, (list, tuple)) else [value]
    if written == ["none"]:
        return ()
    rules = list[RedactionRule]()
    for each in written:
        if isinstance(each, RedactionRule):
            rules.append(each)
        elif isinstance(each, str):
            rules += map(parse_redaction_rule, each.split(";"))
        else:
            raise ValueError("expected rules, for example orders-*:card.number")
    return tuple(rules)


def _between(least: timedelta, most: timedelta) -> AfterValidator:
    def check(value: timedelta) -> timedelta:
        if not least <= value <= most:
            raise ValueError(f"{_show_duration(least)} to {_show_duration(most)} is allowed")
        return value

    return AfterValidator(check)


def _at_least(least: timedelta) -> AfterValidator:
    def check(value: timedelta | None) -> timedelta | None:
        if value is not None and value < least:
            raise ValueError(f"at least {_show_duration(least)} is allowed")
        return value

    return AfterValidator(check)


def _show_duration(duration: timedelta) -> str:
    return format_duration(duration // timedelta(milliseconds=1))


_Duration = Annotated[timedelta, BeforeValidator(_duration)]
_Whole = Annotated[int, Field(le=_WHOLE_MAX), BeforeValidator(_whole)]
_Size = Annotated[int, Field(le=_WHOLE_MAX), BeforeValidator(_size)]
_Processes = Annotated[Literal["auto"] | int, BeforeValidator(_processes)]
_AutomaticSize = Annotated[int | None, Field(ge=0, le=_WHOLE_MAX), _or_none("auto", _size)]
_ListenAddress = Annotated[Address, BeforeValidator(_address)]
_OptionalAddress = Annotated[Address | None, _or_none("off", _address)]
_ConsoleAddress = Annotated[Address | Literal["auto"] | None, _or_none("off", _console)]
_OptionalDuration = Annotated[timedelta | None, _or_none("none", _duration)]
_SwitchedDuration = Annotated[timedelta | None, _or_none("off", _duration)]
_OptionalSize = Annotated[int | None, Field(gt=0, le=_WHOLE_MAX), _or_none("none", _size)]
_PathOrSwitch = Annotated[Path | Literal["auto", "off"], _path_or("auto", "off")]
_OptionalPath = Annotated[Path | None, _or_none("none", _path)]
_Acl = Annotated[Path | None, _or_none("off", _path)]
_Destination = Annotated[Destination | None, _or_none("none", _destination)]
_Endpoints = Annotated[tuple[Address, ...], BeforeValidator(_endpoints)]
_Redaction = Annotated[tuple[RedactionRule, ...], BeforeValidator(_redaction)]
_Topics = Annotated[TopicPatterns, BeforeValidator(_topic_patterns)]
_DelayLevels = Annotated[tuple[timedelta, ...], BeforeValidator(_delay_levels)]

_LOGGED = frozenset({"data", "listen"})  # logged at each start, even with their defaults


class DaemonConfig(BaseSettings):
    """Configuration of the daemon. Durations are ``timedelta``; properties convert them to the units of the parts."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,  # no JSON in variables: values have the same form as in the file
        validate_default=False,
    )

    # -- places
    data: Annotated[Path, BeforeValidator(_path)] = Path("dmq-data")
    must_exist: bool = False  # do not create a store
    listen: _ListenAddress = Address("127.0.0.1", 8081)
    metrics_listen: _OptionalAddress = Address("127.0.0.1", 9464)
    http_api: _OptionalAddress = None  # None: off
    console: _ConsoleAddress = "auto"  # auto: on a loopback address, if it is installed; None: off
    transport: Literal["http2", "grpcio"] = "http2"
    processes: _Processes = 1
    tls_certificate: _PathOrSwitch = "auto"  # auto: self-signed, in <data>/tls
    tls_key: _OptionalPath = None  # None: in the file of the certificate
    tls_client_ca: _OptionalPath = None  # authority of the client certificates
    acl: _Acl = None  # a file of access keys
    redact: _Redaction = ()  # masked contents of messages
    insecure: bool = False  # may listen beyond this host without access keys and TLS
    broker_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,127}$")] = "rock-dmq"

    # -- guarantees
    durability: Literal["disk", "process"] = "disk"
    delay_levels: _DelayLevels = tuple(timedelta(milliseconds=ms) for ms in parse_delay_levels(DELAY_LEVELS_DEFAULT))
    delay_max: _OptionalDuration = None
    queues_per_topic: Annotated[_Whole, Field(ge=1, le=QUEUES_PER_TOPIC_MAX)] = QUEUES_PER_TOPIC_DEFAULT
    group_start: Literal["earliest", "latest"] = "earliest"
    topic_auto_create: bool = True
    group_auto_create: bool = True
    idempotency_window: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(days=30))] = timedelta(minutes=15)

    # -- retention of topics without their own setting
    keep_time: Annotated[_OptionalDuration, _at_least(timedelta(seconds=1))] = timedelta(hours=72)
    keep_bytes: _OptionalSize = None
    keep_unread: bool = True
    failure_reasons: Literal["on", "off"] = "on"

    # -- quotas of topics without their own setting
    topic_max_pending: Annotated[int | None, Field(gt=0, le=2**40), _or_none("none", _whole)] = None
    topic_max_pending_bytes: _OptionalSize = None
    topic_send_rate: Annotated[int | None, Field(gt=0, le=1_000_000), _or_none("none", _whole)] = None

    # -- the host's clock
    clock_jump_max: Annotated[_SwitchedDuration, _at_least(timedelta(seconds=1))] = timedelta(minutes=10)  # None: off
    clock_steady_after: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(days=7))] = timedelta(minutes=10)

    # -- transactions
    transaction_timeout: Annotated[_Duration, _between(timedelta(milliseconds=1), timedelta(hours=1))] = timedelta(
        seconds=6
    )
    transaction_check_interval: Annotated[_Duration, _between(timedelta(milliseconds=1), timedelta(days=1))] = (
        timedelta(seconds=30)
    )
    transaction_checks_max: Annotated[_Whole, Field(ge=1, le=1000)] = 15
    transaction_max_age: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(days=365))] = timedelta(hours=72)

    # -- bounds
    disk_low_water_bytes: _AutomaticSize = None  # None: see low_water_bytes
    ballast_bytes: Annotated[_Size, Field(ge=0)] = 16 * _MIB
    pending_sends_max: Annotated[_Whole, Field(ge=1)] = 65_536
    pending_bytes_max: Annotated[_Size, Field(ge=2 * BODY_BYTES_MAX)] = 256 * _MIB
    connections_max: Annotated[int | None, Field(ge=16, le=_WHOLE_MAX), _or_none("auto", _whole)] = (
        None  # None: the available descriptors
    )
    connections_per_address_max: Annotated[int | None, Field(ge=1, le=_WHOLE_MAX), _or_none("auto", _whole)] = (
        None  # None: a quarter
    )
    connection_idle: Annotated[_OptionalDuration, _at_least(timedelta(seconds=10))] = timedelta(minutes=5)
    receives_waiting_max: Annotated[_Whole, Field(ge=1)] = 10_000
    receives_per_client_max: Annotated[_Whole, Field(ge=1)] = 1024
    streams_max: Annotated[_Whole, Field(ge=1)] = 10_000
    streams_per_client_max: Annotated[_Whole, Field(ge=1)] = 16
    held_bytes_max: Annotated[_Size, Field(ge=64 * _MIB)] = 256 * _MIB
    request_time: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(hours=1))] = timedelta(seconds=30)
    sessions_max: Annotated[_Whole, Field(ge=1)] = 20_000
    schedules_max: Annotated[_Whole, Field(ge=0, le=100_000)] = 10_000
    schedules_per_topic_max: Annotated[_Whole, Field(ge=0, le=100_000)] = 1_000
    audit_outbox_bytes_max: Annotated[_Size, Field(ge=_MIB)] = 1024 * _MIB
    wal_bytes_max: Annotated[_Size, Field(ge=_MIB)] = 32 * _MIB
    memtable_bytes_max: Annotated[_Size, Field(ge=_MIB)] = 64 * _MIB
    shutdown_grace: Annotated[_Duration, _between(timedelta(0), timedelta(minutes=10))] = timedelta(seconds=10)

    # -- in front of a cluster
    broker: Literal["embedded", "rocketmq", "rocketmq-remoting"] = "embedded"
    endpoints: _Endpoints = ()  # of the cluster's proxies
    namesrv: _Endpoints = ()  # the cluster's name servers
    cluster_access_key: Annotated[str | None, _or_none("none", _access_key)] = None  # None: calls are not signed
    cluster_secret_key: Annotated[SecretStr | None, _or_none("none", _secret)] = None
    cluster_tls: bool = False
    cluster_tls_ca: _OptionalPath = None  # None: the authorities of the system
    cluster_timeout: Annotated[_Duration, _between(timedelta(milliseconds=100), timedelta(minutes=1))] = timedelta(
        seconds=3
    )
    away: Literal["accept", "refuse"] = "accept"
    embedded_topics: _Topics = TopicPatterns()  # topics that are not the cluster's
    retries: Literal["cluster", "here"] = "cluster"  # of groups without their own setting
    forward_in_flight_max: Annotated[_Whole, Field(ge=1, le=4096)] = 128  # of one topic
    inner_topic: Annotated[str, Field(pattern=r"^(off|[%|a-zA-Z0-9_-]{1,127})$")] = "off"
    inner_group: Annotated[str, Field(pattern=r"^[%|a-zA-Z0-9_-]{1,120}$")] = "dmq_inner_group"

    # -- the audit trail
    trail: _PathOrSwitch = "auto"  # <data>/trail
    trail_every: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(hours=1))] = timedelta(minutes=1)
    trail_mode: Literal["private", "group"] = "private"  # group: the group of the directory may read its files
    audit_reports: _PathOrSwitch = "auto"  # <data>/audits
    trail_keep: Annotated[_Duration, _between(timedelta(days=1), timedelta(days=3650))] = timedelta(days=14)

    # -- backups by the daemon itself
    backup_every: Annotated[_SwitchedDuration, _at_least(timedelta(minutes=1))] = None  # None: off
    backup_at: Annotated[str | None, _or_none("off", _text)] = None  # a cron expression; None: off
    backup_zone: Annotated[str, BeforeValidator(_text)] = "UTC"  # of backup_at
    backup_dir: _OptionalPath = None
    backups_kept: Annotated[_Whole, Field(ge=1, le=10_000)] = 7

    # -- the second copy
    replica: Literal["off", "async", "sync"] = "off"
    replica_url: Annotated[str | None, _or_none("none", _replica_url)] = None
    replica_every: Annotated[_Duration, _between(timedelta(milliseconds=50), timedelta(hours=1))] = timedelta(seconds=1)
    replica_base_every: Annotated[_Duration, _between(timedelta(minutes=1), timedelta(days=30))] = timedelta(hours=6)
    replica_keep: Annotated[_Duration, _between(timedelta(minutes=1), timedelta(days=3650))] = timedelta(days=7)
    replica_lease: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(minutes=10))] = timedelta(seconds=10)
    standby: bool = False  # do not begin an empty log
    replica_link: _OptionalAddress = None  # where a standby receives batches from the primary; None: off
    replica_link_ca: _OptionalPath = None  # authority of the certificates of both
    replica_when_unreachable: Literal["hold", "local_only"] = "hold"
    replica_lag_bytes_max: Annotated[_Size, Field(ge=_MIB)] = 64 * _MIB
    replica_verify_every: Annotated[_SwitchedDuration, _at_least(timedelta(minutes=1))] = timedelta(days=1)  # None: off

    # -- notifications
    on_dead_letter: _Destination = None
    on_overdue: _Destination = None
    overdue_after: Annotated[_Duration, _between(timedelta(minutes=1), timedelta(days=1))] = timedelta(minutes=1)
    notification_every: Annotated[_Duration, _between(timedelta(seconds=1), timedelta(days=1))] = timedelta(minutes=5)
    webhook_secret_file: _OptionalPath = None
    webhook_private_addresses: bool = False

    # -- logs and traces
    otel_endpoint: Annotated[str | None, _or_none("none", _otel_endpoint)] = None  # None: no spans
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, JSON elsewhere

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Disable all sources except arguments: ``load`` reads the sources itself, to record the source of each
        value.
        """
        return (init_settings,)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Milliseconds of each delay level, level 1 first."""
        return tuple(level // timedelta(milliseconds=1) for level in self.delay_levels)

    @property
    def delay_max_ms(self) -> int | None:
        """Longest accepted delay; None without a bound."""
        return None if self.delay_max is None else self.delay_max // timedelta(milliseconds=1)

    @property
    def idempotency_window_ms(self) -> int:
        """Minimum time for which the message id of a finished message is remembered."""
        return self.idempotency_window // timedelta(milliseconds=1)

    @property
    def clock_jump_max_ms(self) -> int | None:
        """Smallest step forward of the clock that suspends hand-over; None: never."""
        return None if self.clock_jump_max is None else self.clock_jump_max // timedelta(milliseconds=1)

    @property
    def clock_steady_after_ms(self) -> int:
        """Time after a clock step during which the clock is not trusted."""
        return self.clock_steady_after // timedelta(milliseconds=1)

    @property
    def transaction_timeout_ms(self) -> int:
        """Age of a half message at the first check with its producers."""
        return self.transaction_timeout // timedelta(milliseconds=1)

    @property
    def transaction_check_interval_ms(self) -> int:
        """Interval of further checks."""
        return self.transaction_check_interval // timedelta(milliseconds=1)

    @property
    def transaction_max_age_ms(self) -> int:
        """Longest time for which a half message may be pending, with or without checks."""
        return self.transaction_max_age // timedelta(milliseconds=1)

    @property
    def backup_every_ms(self) -> int:
        """Interval of periodic backups; 0 if they are not made at an interval."""
        return 0 if self.backup_every is None else self.backup_every // timedelta(milliseconds=1)

    @property
    def shutdown_grace_s(self) -> float:
        """Longest time of an orderly shutdown."""
        return self.shutdown_grace.total_seconds()

    @property
    def trail_path(self) -> Path | None:
        """Path of the audit trail; None if it is off."""
        if isinstance(self.trail, Path):
            return self.trail
        return self.data / "trail" if self.trail == "auto" else None

    @property
    def audit_reports_path(self) -> Path | None:
        """Folder of the reports of audits; None if it is off."""
        if isinstance(self.audit_reports, Path):
            return self.audit_reports
        return self.data / "audits" if self.audit_reports == "auto" else None

    @model_validator(mode="after")
    def _check_cluster(self) -> DaemonConfig:
        """Raise for a cluster without an address, and for an address without a cluster."""
        for kind, key, what in (
            ("rocketmq", "endpoints", "the addresses of its proxies, such as rocketmq.example:8081"),
            ("rocketmq-remoting", "namesrv", "the addresses of its name servers, such as rocketmq.example:9876"),
        ):
            if (self.broker == kind) != bool(getattr(self, key)):
                raise ValueError(
                    f"broker = {kind} needs {key}, {what}"
                    if self.broker == kind
                    else f"{key} requires broker = {kind}; broker is {self.broker}"
                )
        given = [
            key
            for key in ("cluster_access_key", "cluster_secret_key", "cluster_tls", "cluster_tls_ca")
            if getattr(self, key)
        ]
        if given and self.broker == "embedded":
            raise ValueError(f"{given[0]} requires a cluster; broker is embedded")
        if self.cluster_tls_ca is not None and not self.cluster_tls:
            raise ValueError("cluster_tls_ca requires TLS; set cluster_tls to true")
        if (self.cluster_access_key is None) != (self.cluster_secret_key is None):
            raise ValueError("cluster_access_key and cluster_secret_key require each other")
        if self.embedded_topics != TopicPatterns() and self.broker == "embedded":
            raise ValueError("embedded_topics requires a cluster; broker is embedded")
        if self.embedded_topics.has(self.inner_topic):
            raise ValueError(f"inner_topic {self.inner_topic!r} is the cluster's, so it cannot be in embedded_topics")
        if self.inner_topic != "off" and self.broker == "embedded":
            raise ValueError("inner_topic requires a cluster; broker is embedded")
        return self

    @model_validator(mode="after")
    def _check_backups(self) -> DaemonConfig:
        """Raise for backups without a folder or a rule, and for two rules."""
        if self.backup_every is not None and self.backup_at is not None:
            raise ValueError("backup_every and backup_at exclude each other")
        is_on = self.backup_every is not None or self.backup_at is not None
        if is_on and self.backup_dir is None:
            raise ValueError("backup_every and backup_at require backup_dir, an existing folder on another disk")
        if self.backup_dir is not None and not is_on:
            raise ValueError("backup_dir needs backup_every, such as 6h, or backup_at, such as '0 3 * * *'")
        if self.backup_dir is not None and _resolved(self.backup_dir).is_relative_to(_resolved(self.data)):
            raise ValueError(f"backup_dir {self.backup_dir} is inside the data directory; set it to another folder")
        if self.backup_zone != "UTC" and self.backup_at is None:
            raise ValueError("backup_zone requires backup_at")
        return self

    @model_validator(mode="after")
    def _check_replica(self) -> DaemonConfig:
        """Raise for a replica without a URL, a URL without a replica, and a replica in front of a cluster."""
        if self.replica != "off" and self.replica_url is None:
            raise ValueError(f"replica = {self.replica} needs replica_url, such as s3://bucket/orders")
        if self.replica == "off" and self.replica_url is not None:
            raise ValueError(
                "replica_url is set and replica is off: set replica = sync or async, or remove replica_url"
            )
        if self.standby and self.replica == "off":
            raise ValueError("standby = true needs replica = sync or async, and the replica_url of the primary")
        if self.replica != "off" and self.broker != "embedded":
            raise ValueError(f"replica = {self.replica} needs broker = embedded; broker is {self.broker}")
        return self

    @model_validator(mode="after")
    def _check_link(self) -> DaemonConfig:
        """Raise for a direct link that would be unsafe, and for an authority without a link."""
        if self.replica_link is None:
            if self.replica_link_ca is not None:
                raise ValueError("replica_link_ca requires replica_link")
            return self
        for key, value in (("replica", "sync"), ("durability", "disk"), ("replica_when_unreachable", "hold")):
            if getattr(self, key) != value:
                raise ValueError(f"replica_link requires {key} = {value}; {key} is {getattr(self, key)}")
        if self.replica_link_ca is None and not is_loopback(self.replica_link.host):
            raise ValueError(
                f"replica_link = {self.replica_link} is open to other hosts, which needs replica_link_ca, "
                "the authority of the certificates of both hosts"
            )
        if self.replica_link_ca is not None and not isinstance(self.tls_certificate, Path):
            raise ValueError(
                "replica_link_ca requires a tls_certificate that is a file, signed by that authority for servers and "
                f"clients; tls_certificate is {self.tls_certificate}"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> DaemonConfig:
        """Raise for a key without a certificate, and for client certificates without TLS."""
        if self.tls_client_ca is not None and (self.transport == "grpcio" or self.tls_certificate == "off"):
            raise ValueError("tls_client_ca requires TLS and the transport http2")
        if isinstance(self.tls_certificate, Path) and self.transport == "grpcio":
            raise ValueError("tls_certificate requires the transport http2; grpcio supports plain text only")
        if self.tls_key is not None and not isinstance(self.tls_certificate, Path):
            raise ValueError(
                f"tls_key is the key of a tls_certificate that is a file, and tls_certificate = {self.tls_certificate}"
            )
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> DaemonConfig:
        """Raise for front processes with the grpcio transport, which does not support them."""
        if self.transport == "grpcio" and self.processes not in (1, "auto"):
            raise ValueError(f"processes = {self.processes} needs the transport http2; transport is grpcio")
        if self.processes != "auto" and self.processes > fronts_max(self.held_bytes_max):
            each, needed = PROCESS_HELD_BYTES_MIN, PROCESS_HELD_BYTES_MIN * (self.processes + 1)
            raise ValueError(
                f"processes = {self.processes} leaves less than {format_size(each)} of held_bytes_max = "
                f"{format_size(self.held_bytes_max)} to each front and to the process with the store: set "
                f"held_bytes_max = {format_size(needed)} or more, or fewer processes"
            )
        return self

    @model_validator(mode="after")
    def _check_listen(self) -> DaemonConfig:
        """Raise if other hosts would be served without authentication or encryption and ``insecure`` is not set."""
        if self.insecure or is_loopback(self.listen.host):
            return self
        missing = []
        if self.acl is None and self.tls_client_ca is None:
            missing.append("access keys (acl; 'dmq acl new' makes one)")
        if self.tls_certificate == "off" or self.transport == "grpcio":
            missing.append("TLS (tls_certificate, and the transport http2)")
        if missing:
            raise ValueError(
                f"listen = {self.listen} serves other hosts without {' and '.join(missing)}: set that up, listen on "
                "127.0.0.1, or set insecure = true (DMQ_INSECURE=true, --insecure) in a trusted network"
            )
        return self

    @model_validator(mode="after")
    def _check_web(self) -> DaemonConfig:
        """Raise if the HTTP API or the console would serve other hosts without access keys or TLS.

        ``insecure`` allows it for the HTTP API alone. A client certificate is no substitute for a key: the daemon does
        not see those of HTTP clients.
        """
        has_both = self.acl is not None and self.tls_certificate != "off" and self.transport != "grpcio"
        for key, address in (("http_api", self.http_api), ("console", self.console)):
            if has_both or not isinstance(address, Address) or is_loopback(address.host):
                continue
            if key == "console" or not self.insecure:
                rest = "" if key == "console" else ", or set insecure = true"
                raise ValueError(
                    f"{key} = {address} serves other hosts, which needs access keys (acl) and TLS "
                    f"(tls_certificate, and the transport http2): set them, or listen on 127.0.0.1{rest}"
                )
        return self

    @model_validator(mode="after")
    def _check_notifications(self) -> DaemonConfig:
        """Raise for a webhook without a secret, and for a secret without a webhook."""
        webhooks = [key for key in ("on_dead_letter", "on_overdue") if isinstance(getattr(self, key), WebhookUrl)]
        if webhooks and self.webhook_secret_file is None:
            raise ValueError(
                f"{webhooks[0]} is a URL and needs webhook_secret_file, the secret that signs its webhooks"
            )
        if self.webhook_secret_file is not None and not webhooks:
            raise ValueError("webhook_secret_file requires a URL in on_dead_letter or on_overdue")
        return self

    @property
    def metrics_listen_is_explicit(self) -> bool:
        """True if the metrics address is configured. If not, a busy port is replaced by another one."""
        return "metrics_listen" in self.model_fields_set

    def low_water_bytes(self, file_system_bytes: int) -> int:
        """Free space below which sends are refused: the setting, else 5 % of the file system, from 32 MiB to 1 GiB."""
        if self.disk_low_water_bytes is not None:
            return self.disk_low_water_bytes
        return min(max(file_system_bytes // LOW_WATER_SHARE, LOW_WATER_BYTES_MIN), LOW_WATER_BYTES_MAX)

    def shown(self, *, changed_only: bool = False) -> dict[str, object]:
        """Return the keys as written in the file, with masked secrets; logged at start.

        ``changed_only`` limits them to ``data``, ``listen`` and values that differ from the default. 'dmq config show'
        has all.
        """
        values = {key: getattr(self, key) for key in type(self).model_fields}
        if changed_only:
            fields = type(self).model_fields.items()
            defaults = {key: field.get_default(call_default_factory=True) for key, field in fields}
            values = {key: each for key, each in values.items() if key in _LOGGED or each != defaults[key]}
        for key in [key for key, value in values.items() if isinstance(value, bool)]:
            values[key] = str(values[key]).lower()  # as TOML has it
        return {key: _WRITTEN_NONE[key] if value is None else _shown(value) for key, value in values.items()}


def load(flags: Mapping[str, object] | None = None, *, config_file: Path | None = None) -> DaemonConfig:
    """Read the configuration from its sources; a flag that is None was not given.

    Raise ``ConfigError`` with all faults, not only the first.
    """
    return load_with_origins(flags, config_file=config_file)[0]


def load_with_origins(
    flags: Mapping[str, object] | None = None, *, config_file: Path | None = None
) -> tuple[DaemonConfig, dict[str, str]]:
    """Return the configuration like ``load``, and the source of each key.

    The source is the flag (``--listen``), the variable (``DMQ_LISTEN``), the path of the file, or ``default``.
    """
    problems = _unknown_variables()
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for key, value in _file_values(config_file, problems).items():
        values[key] = value
        origins[key] = str(_config_path(config_file))
    for key, value in EnvSettingsSource(DaemonConfig)().items():
        values[key] = value
        origins[key] = ENV_PREFIX + key.upper()
    if OTEL_ENDPOINT_VARIABLE in os.environ and "otel_endpoint" not in values and is_installed("opentelemetry.sdk"):
        values["otel_endpoint"] = os.environ[OTEL_ENDPOINT_VARIABLE] or "none"
        origins["otel_endpoint"] = OTEL_ENDPOINT_VARIABLE
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = value
            origins[key] = "--" + key.replace("_", "-")
    for key in [key for key, value in values.items() if not _is_unicode(value)]:  # as the system decodes other bytes
        problems.append(f"{origins[key]}: {key} = {ascii(values.pop(key))[:_VALUE_CHARS_MAX]}: not UTF-8")
    try:
        config = DaemonConfig(**values)  # type: ignore[arg-type]  # the model is what checks them
    except ValidationError as error:
        problems += [_problem(details, origins) for details in error.errors(include_url=False)]
    else:
        if not problems:
            return config, {key: origins.get(key, "default") for key in DaemonConfig.model_fields}
    raise ConfigError(problems, values.get("log_format"))


def _config_path(config_file: Path | None) -> Path:
    return config_file or Path(os.environ.get("DMQ_CONFIG") or CONFIG_FILE_DEFAULT)


def _file_values(config_file: Path | None, problems: list[str]) -> Mapping[str, object]:
    path = _config_path(config_file)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        # Only the default file may be missing: a named file must exist.
        if config_file is not None or os.environ.get("DMQ_CONFIG"):
            problems.append(f"the configuration file {path} does not exist")
        return {}
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")
        return {}
    if not path.is_file():  # the library would treat it as a missing one
        problems.append(f"{path}: not a regular file")
        return {}
    try:
        return TomlConfigSettingsSource(DaemonConfig, path).toml_data
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: not readable as TOML: {error}")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")
    return {}


def _is_unicode(value: object) -> bool:
    return not isinstance(value, str | Path) or not any("\ud800" <= char <= "\udfff" for char in str(value))


def _unknown_variables() -> list[str]:
    known = {ENV_PREFIX + key.upper() for key in DaemonConfig.model_fields}
    return [
        f"{name}: unknown variable{_nearest(name.upper(), known | _OTHER_VARIABLES)}"
        for name, value in sorted(os.environ.items())
        if name.upper().startswith(ENV_PREFIX)
        and name.upper() not in known | _OTHER_VARIABLES
        and not name.upper().startswith(_OTHER_PREFIXES)
        and not _SERVICE.fullmatch(name)
        and not _SERVICE_URL.fullmatch(f"{name}={value}")
    ]


def _nearest(name: str, known: set[str] | frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _problem(details: ErrorDetails, origins: Mapping[str, str]) -> str:
    if not details["loc"]:  # about several keys together
        return f"configuration: {_allowed(details)}"
    key = str(details["loc"][0])
    origin = origins.get(key, "default")
    if details["type"] == "extra_forbidden":  # the value is left out, because a misspelt key may hold a secret
        return f"{origin}: {key}: unknown key{_nearest(key, set(DaemonConfig.model_fields))}"
    if key in {
        "cluster_secret_key",
        "replica_url",
        "on_dead_letter",
        "on_overdue",
        "otel_endpoint",
    }:  # a password in a URL
        return f"{origin}: {key}: {_allowed(details)}"
    shown = repr(_shown(details["input"]))
    if len(shown) > _VALUE_CHARS_MAX:
        shown = shown[:_VALUE_CHARS_MAX] + "..."
    return f"{origin}: {key} = {shown}: {_allowed(details)}"


def _allowed(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            return f"allowed: {context['expected'].replace(' or ', ', ')}"
        case "greater_than_equal":
            return f"at least {context['ge']} is allowed"
        case "less_than_equal":
            return f"at most {context['le']} is allowed"
        case "int_parsing" | "int_type" | "int_from_float":
            return "a whole number is expected"
        case "string_pattern_mismatch":
            return f"it must match {context['pattern']}"
        case _:
            return details["msg"]


def _shown(value: object) -> object:
    match value:
        case TopicPatterns():
            return str(value)
        case timedelta():
            return _show_duration(value)
        case tuple() if not value or isinstance(value[0], Address | RedactionRule):
            return ";".join(map(str, value)) or "none"
        case tuple() if not isinstance(value, Address):
            return format_delay_levels(tuple(level // timedelta(milliseconds=1) for level in value))
        case Address() | Path() | SecretStr() | WebhookUrl() | NotificationTopic():  # a secret prints as stars
            return str(value)
        case _:
            return value
