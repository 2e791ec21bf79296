"""Configuration: which source wins, and that nothing wrong or misspelt is ever taken silently."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

import dmq.cli
from dmq.config.settings import LOW_WATER_BYTES_MAX, LOW_WATER_BYTES_MIN, ConfigError, DaemonConfig, load
from dmq.config.units import Address


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that no dmq.toml of this machine plays a part."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(flags: dict[str, object] | None = None, config_file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(flags, config_file=config_file)
    return list(caught.value.problems)


def test_no_configuration_is_needed() -> None:
    """The defaults are what the documentation says."""
    config = load()
    assert config.data == Path("dmq-data")
    assert config.listen == Address("127.0.0.1", 8081)
    assert config.metrics_listen == Address("127.0.0.1", 9464)
    assert not config.metrics_listen_is_explicit
    assert config.durability == "disk"
    assert len(config.delay_levels_ms) == 18
    assert config.delay_max_ms is None
    assert config.queues_per_topic == 8
    assert config.group_start == "earliest"
    assert config.idempotency_window_ms == 900_000
    assert config.shutdown_grace_s == 10.0


def test_flags_beat_the_environment_beats_the_file_beats_defaults(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key per source wins, and a flag that was not given (None) wins nothing."""
    (elsewhere / "dmq.toml").write_text(
        'broker_name = "file"\nqueues_per_topic = 2\ndelay_max = "1d"\n', encoding="utf-8"
    )
    monkeypatch.setenv("DMQ_BROKER_NAME", "environment")
    monkeypatch.setenv("DMQ_QUEUES_PER_TOPIC", "3")
    config = load({"broker_name": "flag", "queues_per_topic": None})
    assert (config.broker_name, config.queues_per_topic, config.delay_max_ms) == ("flag", 3, 86_400_000)
    assert config.group_start == "earliest"


def test_the_file_is_the_flags_then_the_variables_then_the_one_here(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--config, DMQ_CONFIG, ./dmq.toml, in this order."""
    for name in ("dmq", "variable", "flag"):
        (elsewhere / f"{name}.toml").write_text(f'broker_name = "{name}"\n', encoding="utf-8")
    assert load().broker_name == "dmq"
    monkeypatch.setenv("DMQ_CONFIG", "variable.toml")
    assert load().broker_name == "variable"
    assert load(config_file=Path("flag.toml")).broker_name == "flag"


def test_limits_of_kept_topics_may_be_absent() -> None:
    """72 hours and no size unless told; nothing so short that it would keep nothing."""
    config = load()
    assert (config.keep_time, config.keep_bytes, config.keep_unread) == (timedelta(hours=72), None, True)
    config = load({"keep_time": "none", "keep_bytes": "50GiB", "keep_unread": "false"})
    assert (config.keep_time, config.keep_bytes, config.keep_unread) == (None, 50 * 2**30, False)
    assert (config.shown()["keep_time"], config.shown()["keep_bytes"]) == ("none", 50 * 2**30)
    for wrong in ({"keep_time": "999ms"}, {"keep_bytes": "0"}, {"keep_bytes": "much"}):
        with pytest.raises(ConfigError):
            load(wrong)


def test_processes_are_a_number_or_auto() -> None:
    """One line says what is allowed; the library's transport has no fronts."""
    found = [load({"processes": each, "held_bytes_max": "2GiB"}).processes for each in ("auto", "1", 64)]
    assert found == ["auto", 1, 64]
    for wrong in ("0", 65, "many", True, 2.5):
        (problem,) = problems({"processes": wrong})
        assert problem == f"--processes: processes = {wrong!r}: allowed: auto, or 1 to 64"
    assert load({"processes": "auto", "transport": "grpcio"}).processes == "auto"
    assert "needs the transport http2" in problems({"processes": 2, "transport": "grpcio"})[0]


def test_a_variable_is_written_as_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of levels is no JSON list."""
    monkeypatch.setenv("DMQ_DELAY_LEVELS", "1s 5s")
    monkeypatch.setenv("DMQ_METRICS_LISTEN", "off")
    config = load()
    assert (config.delay_levels_ms, config.metrics_listen) == ((1000, 5000), None)


def test_a_named_file_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the default file may be absent."""
    assert problems(config_file=Path("gone.toml")) == ["the configuration file gone.toml does not exist"]
    monkeypatch.setenv("DMQ_CONFIG", "gone-too.toml")
    assert problems() == ["the configuration file gone-too.toml does not exist"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"listen = ", "not readable as TOML"),
        (b'a = "\xff"', "not readable as TOML"),
        (b"[listen]\nhost = 1", "host:port is expected"),
    ],
)
def test_a_file_that_is_wrong_is_named(elsewhere: Path, content: bytes, expected: str) -> None:
    """One line with the file's name, whatever is in it."""
    (elsewhere / "dmq.toml").write_bytes(content)
    (problem,) = problems()
    assert problem.startswith("dmq.toml: ")
    assert expected in problem


def test_a_file_that_is_a_directory_is_named(elsewhere: Path) -> None:
    """An unreadable file is an error of the configuration, not a crash and not an absent file."""
    (elsewhere / "dmq.toml").mkdir()
    assert problems() == ["dmq.toml: not a regular file"]


def test_unknown_keys_are_refused_with_the_nearest_known_one(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting is never a silent default, in the file nor in the environment; its value is not repeated."""
    (elsewhere / "dmq.toml").write_text('log_levl = "hunter2"\n', encoding="utf-8")
    monkeypatch.setenv("DMQ_LISTN", "hunter2")
    monkeypatch.setenv("DMQ_ZZZ", "1")
    assert problems() == [
        "DMQ_LISTN: unknown variable; did you mean DMQ_LISTEN?",
        "DMQ_ZZZ: unknown variable",
        "dmq.toml: log_levl: unknown key; did you mean log_level?",
    ]


def test_the_addresses_of_a_kubernetes_service_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes tells every container of every Service; one that is called dmq, or dmq-peers, begins as ours do."""
    monkeypatch.setenv("DMQ_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("DMQ_SERVICE_PORT", "8081")
    monkeypatch.setenv("DMQ_SERVICE_PORT_GRPC_WEB", "8081")
    monkeypatch.setenv("DMQ_PEERS_PORT", "tcp://10.0.0.7:8081")
    for name in ("", "_PROTO", "_PORT", "_ADDR"):
        monkeypatch.setenv(f"DMQ_PEERS_PORT_8081_TCP{name}", "tcp")
    assert load() == DaemonConfig()
    monkeypatch.setenv("DMQ_PORT", "8081")  # what somebody set who takes it for a setting
    assert problems() == ["DMQ_PORT: unknown variable; did you mean DMQ_TRANSPORT?"]


def test_variables_of_commands_stop_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a spool named for ``dmq spool`` can run a daemon, and ``dmq audit``, in the same shell."""
    commands = Path(dmq.cli.__file__).parent
    read = {name for each in commands.rglob("*.py") for name in re.findall(r'envvar="(\w+)"', each.read_text("utf-8"))}
    assert read >= {"DMQ_SPOOL", "DMQ_CONFIG"}
    for name in read - {f"DMQ_{key.upper()}" for key in DaemonConfig.model_fields} - {"DMQ_CONFIG"}:
        monkeypatch.setenv(name, "x")
    assert load() == DaemonConfig()


def test_embedded_topics_are_refused_where_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster the setting would say nothing; the refusal says what is needed."""
    monkeypatch.setenv("DMQ_EMBEDDED_TOPICS", "orders;bills*")
    assert "embedded_topics requires a cluster" in problems()[0]
    monkeypatch.setenv("DMQ_BROKER", "rocketmq")
    monkeypatch.setenv("DMQ_ENDPOINTS", "127.0.0.1:8081")
    assert load().embedded_topics.has("bills-2026")


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, the demo, tests and hooks have variables of their own; an empty one counts as unset."""
    for name in (
        "DMQ_ADDRESS",
        "DMQ_DEBUG",
        "DMQ_TEST_KILLS",
        "DMQ_DEMO_X",
        "DMQ_SPOOL",
        "DMQ_COMPILED",
        "DMQ_HOOK_MODE",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DMQ_LISTEN", "")
    assert load().listen.port == 8081


def test_every_fault_has_a_line_with_source_key_value_and_allowed_values(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is wrong is told at once."""
    (elsewhere / "dmq.toml").write_text('durability = "maybe"\nwal_bytes_max = true\n', encoding="utf-8")
    monkeypatch.setenv("DMQ_DELAY_MAX", "5 weeks")
    found = problems({"queues_per_topic": "0", "idempotency_window": "31d", "listen": "x" * 200})
    assert sorted(found) == [
        "--idempotency-window: idempotency_window = '31d': 1s to 30d is allowed",
        f"--listen: listen = '{'x' * 79}...: host:port is expected, such as 127.0.0.1:8081 or [::1]:8081",
        "--queues-per-topic: queues_per_topic = '0': at least 1 is allowed",
        "DMQ_DELAY_MAX: delay_max = '5 weeks': a duration is expected, such as 500ms, 10s, 15m, 1h30m or 2d",
        "dmq.toml: durability = 'maybe': allowed: 'disk', 'process'",
        "dmq.toml: wal_bytes_max = True: a whole number is expected",
    ]


def test_a_duration_without_a_unit_is_refused_wherever_it_is_from(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In milliseconds it was taken before: who upgrades is told the key, where it is set, and what it may mean."""
    (elsewhere / "dmq.toml").write_text('delay_max = 3\nkeep_time = "72"\ntrail_every = 0\n', encoding="utf-8")
    monkeypatch.setenv("DMQ_REQUEST_TIME", "30000")
    assert sorted(problems({"delay_levels": "1s 5 10s"})) == [
        "--delay-levels: delay_levels = '1s 5 10s': a duration needs a unit: 5ms, 5s or 5m",
        "DMQ_REQUEST_TIME: request_time = '30000': a duration needs a unit: 30000ms, 30000s or 30000m",
        "dmq.toml: delay_max = 3: a duration needs a unit: 3ms, 3s or 3m",
        "dmq.toml: keep_time = '72': a duration needs a unit: 72ms, 72s or 72m",
        "dmq.toml: trail_every = 0: 1s to 1h is allowed",
    ]


@pytest.mark.parametrize("value", [[], {}, 1.5, True, "1s 2q", [1, 2], "\0"])
def test_values_of_any_type_are_refused_with_a_line(value: object) -> None:
    """TOML has lists, tables, floats and dates; none of them gets an exception of another kind."""
    for key in ("listen", "metrics_listen", "delay_levels", "delay_max", "queues_per_topic", "ballast_bytes"):
        (problem,) = problems({key: value})
        assert problem.startswith(f"--{key.replace('_', '-')}: {key} = ")


@pytest.mark.parametrize("value", ["", "  ", True, False, 1, [], {}, "a\0b"])
@pytest.mark.parametrize("key", ["data", "trail", "tls_certificate", "tls_key", "acl", "backup_dir"])
def test_an_invalid_path_is_refused(key: str, value: object) -> None:
    """``trail = false`` was a folder named False, and no folder at all the current one."""
    (problem,) = problems({key: value})
    assert problem.startswith(f"--{key.replace('_', '-')}: {key} = ")
    assert problem.endswith("a path is expected")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("False", "if a file or folder has this name, write ./False"),  # what a variable says for a switch
        ("NONE", "write ./NONE"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name names the home directory of an unknown user"),
        (f"a/{'x' * 256}", "255 of each name"),
        ("a/" * 2_000, "3840 bytes"),
        ("a\udcffb", "not UTF-8"),
    ],
)
@pytest.mark.parametrize("key", ["data", "trail", "acl", "backup_dir"])
def test_an_impossible_path_is_refused_as_a_setting(key: str, value: str, said: str) -> None:
    """Behind the settings each ended in another way: a folder of that name, an unexpected error, a store half made."""
    (problem,) = problems({key: value})
    assert problem.startswith(f"--{key.replace('_', '-')}: {key} = ")
    assert said in problem


def test_numbers_have_a_bound_that_libraries_can_take() -> None:
    """TOML's have none: RocksDB was given them behind an opened store."""
    keys = ("wal_bytes_max", "memtable_bytes_max", "keep_bytes", "disk_low_water_bytes", "connections_max")
    for key in (*keys, "pending_sends_max", "connections_per_address_max"):
        for value in (2**70, "1180591620717411303424", "9000000TiB"):
            (problem,) = problems({key: value})
            assert problem.startswith(f"--{key.replace('_', '-')}: {key} = ")
    load(dict.fromkeys(keys, 2**60))


def test_loops_of_links_are_left_to_the_checks(elsewhere: Path) -> None:
    """Whether one folder lies in another is asked without an exception."""
    (elsewhere / "loop").symlink_to("loop")
    load({"data": "data", "backup_every": "6h", "backup_dir": "loop/x"})
    load({"data": "loop", "backup_every": "6h", "backup_dir": "elsewhere"})
    (problem,) = problems(config_file=elsewhere / "loop")
    assert "symbolic links" in problem
    assert "too long" in problems(config_file=Path("x" * 300))[0]


@pytest.mark.parametrize("value", [5, True, {}, "", [1, "orders"], [None]])
@pytest.mark.parametrize("key", ["endpoints", "embedded_topics", "cluster_access_key", "cluster_secret_key"])
def test_text_that_is_no_utf8_is_refused_of_a_cluster(key: str, value: object) -> None:
    """A key of 5 was a text, and a list of numbers topics. What a secret was is not shown."""
    cluster: dict[str, object] = {"broker": "rocketmq", "endpoints": "127.0.0.1:8081"}
    keys: dict[str, object] = {"cluster_access_key": "a", "cluster_secret_key": "hunter2"}
    (problem,) = problems({**cluster, **keys, key: value})
    assert problem.startswith(f"--{key.replace('_', '-')}: {key}")
    assert (repr(value) in problem) == (key != "cluster_secret_key")


@pytest.mark.parametrize("key", ["a b", "a\n", "\u00fc"])
def test_an_access_key_is_a_header(key: str) -> None:
    """So it is ASCII, and nothing that ends one."""
    cluster = {"broker": "rocketmq", "endpoints": "127.0.0.1:8081", "cluster_secret_key": "hunter2"}
    (problem,) = problems({**cluster, "cluster_access_key": key})
    assert "a text of ASCII without spaces is expected" in problem


@pytest.mark.parametrize("key", ["backup_at", "backup_zone"])
def test_when_backups_are_made_is_a_text(key: str) -> None:
    """``False`` was a cron expression, and no zone at all was UTC."""
    rest = {"backup_at": "0 3 * * *", "backup_dir": "elsewhere", "backup_zone": "UTC"}
    for value in ("", " ", False, 5, ["0 3 * * *"], "0 3 * * *\0"):
        (problem,) = problems({**rest, key: value})
        assert problem.endswith("a text is expected")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tls_client_ca": "ca.pem", "tls_certificate": "off"}, "tls_client_ca requires TLS and the transport http2"),
        ({"tls_client_ca": "ca.pem", "transport": "grpcio"}, "tls_client_ca requires TLS and the transport http2"),
        ({"tls_certificate": "own.pem", "transport": "grpcio"}, "tls_certificate requires the transport http2"),
    ],
)
def test_certificates_that_no_client_would_see_are_refused(flags: dict[str, object], said: str) -> None:
    """Who sets one wants it used."""
    (problem,) = problems(flags)
    assert said in problem


@pytest.mark.parametrize("certificate", ["auto", "off"])
def test_a_key_without_its_certificate_is_refused(certificate: str) -> None:
    """Another certificate would be served, or none, without a word."""
    (problem,) = problems({"tls_key": "key.pem", "tls_certificate": certificate})
    assert f"tls_certificate = {certificate}" in problem
    load({"tls_key": "key.pem", "tls_certificate": "certificate.pem"})


def test_words_for_none(elsewhere: Path) -> None:
    """TOML has no null, so each optional key has a word for it; shown() writes the same words."""
    config = load({"metrics_listen": "off", "delay_max": "none", "disk_low_water_bytes": "auto"})
    assert (config.metrics_listen, config.delay_max_ms, config.disk_low_water_bytes) == (None, None, None)
    assert config.metrics_listen_is_explicit
    shown = config.shown()
    assert (shown["metrics_listen"], shown["delay_max"], shown["disk_low_water_bytes"]) == ("off", "none", "auto")


def test_the_output_can_be_loaded_again() -> None:
    """shown() writes every key as the file would have it."""
    config = load(
        {"listen": "[::1]:0", "delay_levels": "1s 500ms 2ms", "delay_max": "36h", "disk_low_water_bytes": "1GiB"}
    )
    assert config.delay_levels_ms == (1000, 500, 2)
    assert load(config.shown()) == config


def test_secrets_are_masked() -> None:
    """A key of type SecretStr is printed as stars, however it is printed."""

    class WithSecret(DaemonConfig):
        token: SecretStr = SecretStr("hunter2")

    config = WithSecret()
    assert config.shown()["token"] == "**********"
    assert "hunter2" not in repr(config)


def test_constructing_reads_neither_environment_nor_file(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests and embedders get what they say."""
    (elsewhere / "dmq.toml").write_text("queues_per_topic = 2\n", encoding="utf-8")
    monkeypatch.setenv("DMQ_QUEUES_PER_TOPIC", "3")
    assert DaemonConfig(listen=Address("::1", 0)).queues_per_topic == 8


def test_a_configuration_cannot_be_changed() -> None:
    """It is read once; who wants another one makes another one."""
    with pytest.raises(ValidationError):
        DaemonConfig().queues_per_topic = 2


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde in the file means what it means in a shell."""
    monkeypatch.setenv("HOME", "/somewhere")
    assert load({"data": "~/dmq"}).data == Path("/somewhere/dmq")


def test_the_low_water_mark_follows_the_file_system_within_bounds() -> None:
    """5 %, at least 32 MiB, at most 1 GiB; a value that is set wins."""
    automatic = DaemonConfig()
    assert automatic.low_water_bytes(10 * 2**30) == 2**29
    assert automatic.low_water_bytes(1) == LOW_WATER_BYTES_MIN
    assert automatic.low_water_bytes(2**50) == LOW_WATER_BYTES_MAX
    assert DaemonConfig(disk_low_water_bytes=7).low_water_bytes(2**50) == 7


def test_a_file_of_access_keys_is_named_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off unless somebody names one; the variables of the command line are none of the daemon's."""
    monkeypatch.setenv("DMQ_ACCESS_KEY", "operator")
    monkeypatch.setenv("DMQ_SECRET_KEY", "hunter2")
    assert (load().acl, load().shown()["acl"]) == (None, "off")
    monkeypatch.setenv("DMQ_ACL", "acl.toml")
    assert load().acl == Path("acl.toml")
    assert load({"acl": "off"}).acl is None
    assert "hunter2" not in str(load().shown())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"broker": "rocketmq"}, "needs endpoints"),
        ({"endpoints": "127.0.0.1:8081"}, "endpoints requires broker = rocketmq; broker is embedded"),
        ({"broker": "rocketmq", "endpoints": "127.0.0.1"}, "host:port is expected"),
        ({"broker": "rocketmq", "endpoints": "127.0.0.1:8081;"}, "host:port is expected"),
        ({"broker": "rocketmq-remoting"}, "needs namesrv"),
        ({"broker": "rocketmq-remoting", "endpoints": "127.0.0.1:8081"}, "endpoints requires broker = rocketmq"),
        ({"broker": "rocketmq", "endpoints": "127.0.0.1:8081", "namesrv": "127.0.0.1:9876"}, "namesrv requires broker"),
        ({"inner_topic": "dmq_inner_topic"}, "inner_topic requires a cluster"),
        (
            {"broker": "rocketmq", "endpoints": "127.0.0.1:8081", "cluster_access_key": "key"},
            "cluster_access_key and cluster_secret_key require each other",
        ),
        ({"cluster_access_key": "key"}, "cluster_access_key requires a cluster; broker is embedded"),
        ({"cluster_tls": "true"}, "cluster_tls requires a cluster"),
        (
            {"broker": "rocketmq", "endpoints": "127.0.0.1:8081", "cluster_tls_ca": "ca.pem"},
            "set cluster_tls to true",
        ),
    ],
)
def test_half_a_cluster_is_refused(flags: dict[str, object], expected: str) -> None:
    """Keys that need each other are named, and no value of others is shown with them."""
    (line,) = problems({**flags, "broker_name": "looks-like-a-secret"})
    assert expected in line
    assert "looks-like-a-secret" not in line


def test_a_cluster_is_named_by_its_proxies() -> None:
    """One address or several, as they are shown."""
    config = load({"broker": "rocketmq", "endpoints": "10.0.0.1:8081;[::1]:8082"})
    assert config.endpoints == (Address("10.0.0.1", 8081), Address("::1", 8082))
    assert config.shown()["endpoints"] == "10.0.0.1:8081;[::1]:8082"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "access keys"),
        ({"acl": "acl.toml", "tls_certificate": "off"}, "TLS"),
        ({"acl": "acl.toml", "transport": "grpcio"}, "TLS"),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.7", "dmq.example"])
def test_other_hosts_are_not_served_by_accident(flags: dict[str, object], said: str, host: str) -> None:
    """Without keys, or without TLS, it takes ``insecure``; the refusal says what is missing and what to do."""
    listen: dict[str, object] = {"listen": f"{host}:8081", **flags}
    (found,) = problems(listen)
    assert said in found
    assert "insecure = true" in found
    assert load({**listen, "insecure": "true"}).insecure


@pytest.mark.parametrize("key", ["http_api", "console"])
@pytest.mark.parametrize("flags", [{}, {"acl": "a", "tls_certificate": "off"}, {"acl": "a", "transport": "grpcio"}])
def test_web_processes_serve_other_hosts_with_keys_and_tls_only(key: str, flags: dict[str, object]) -> None:
    """A client certificate of the daemon is no substitute for a key: browsers and HTTP clients present none."""
    (found,) = problems({key: "0.0.0.0:8083", **flags})
    assert "access keys" in found
    assert getattr(load({key: "127.0.0.1:8083", **flags}), key)
    assert getattr(load({key: "0.0.0.0:8083", "acl": "a"}), key)


def test_insecure_is_for_the_http_api_and_never_for_the_console() -> None:
    """A person signs in to the console, and a secret is not sent in plain text."""
    assert load({"http_api": "0.0.0.0:8083", "insecure": "true"}).http_api
    assert "access keys" in problems({"console": "0.0.0.0:8082", "insecure": "true"})[0]


def test_the_console_is_automatic_off_or_an_address() -> None:
    """Without an address its port may be replaced by another one."""
    assert [load({"console": each}).console for each in ("auto", "off", "[::1]:0")] == ["auto", None, Address("::1", 0)]
    assert load().console == "auto"
    assert "host:port is expected" in problems({"console": "8082"})[0]


@pytest.mark.parametrize(
    "flags", [{"listen": "0.0.0.0:8081", "acl": "a"}, {"listen": "[::1]:1"}, {"listen": "localhost:1"}]
)
def test_a_daemon_with_keys_and_tls_or_on_the_loopback_needs_no_more(flags: dict[str, object]) -> None:
    """Access keys and the certificate that signs itself are enough; so is a client's certificate in a key's stead."""
    load(flags)
    load({"listen": "0.0.0.0:1", "tls_client_ca": "ca.pem"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"replica": "sync"}, "needs replica_url"),
        ({"replica_url": "s3://bucket/orders"}, "replica is off"),
        ({"replica": "sync", "replica_url": "s3://bucket", "broker": "rocketmq", "endpoints": "a:1"}, "needs broker"),
        ({"replica": "sync", "replica_url": "s3://key:secret@bucket/orders"}, "without credentials"),
        ({"replica": "sync", "replica_url": "http://bucket/orders"}, "s3://, gs:// or az://"),
        ({"replica": "sync", "replica_url": "s3:///orders"}, "needs the name of a bucket"),
        ({"replica": "sync", "replica_url": "file://orders"}, "needs an absolute path"),
        ({"replica": "sync", "replica_url": "file:///"}, "needs an absolute path"),
        ({"replica": "twice", "replica_url": "file:///copy"}, "'off', 'async', 'sync'"),
    ],
)
def test_a_replica_without_a_place_is_refused(flags: dict[str, object], said: str) -> None:
    """The mode and the URL of the second copy belong together, and the URL has no credentials."""
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load(flags)
    assert "secret" not in str(caught.value)


_LINKED = {"replica": "sync", "replica_url": "file:///copy", "replica_link": "127.0.0.1:8085"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"replica": "async"}, "requires replica = sync; replica is async"),
        ({"durability": "process"}, "requires durability = disk; durability is process"),
        ({"replica_when_unreachable": "local_only"}, "requires replica_when_unreachable = hold"),
        ({"replica_link": "10.0.0.1:8085"}, "open to other hosts, which needs replica_link_ca"),
        ({"replica_link": "off", "replica_link_ca": "ca.pem"}, "replica_link_ca requires replica_link"),
        ({"replica_link_ca": "ca.pem"}, "requires a tls_certificate that is a file"),
    ],
)
def test_an_unsafe_direct_link_is_refused(flags: dict[str, object], reason: str) -> None:
    """The copy on the local disk counts, no write leaves it out, and other hosts need certificates."""
    load(_LINKED)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load(_LINKED | flags)
