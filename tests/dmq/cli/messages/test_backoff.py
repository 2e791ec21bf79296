"""What a retry policy means, attempt by attempt, and what its options make of it; without a daemon."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from support.rigs.commands.fake_admin_client import error_of
from support.rigs.commands.fake_admin_client import run_dmq as run

from dmq.cli.session.policy_options import PolicyOptions
from retry.policy import Exponential, Fixed, RetryPolicy, Table, from_plain

START = 1_769_853_600_000  # 2026-01-31T10:00:00Z
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


# -- show --------------------------------------------------------------------------------------------------------------


def test_the_default_policy_for_people() -> None:
    """17 attempts, the 16 delays between them, and how long it all takes."""
    result = run("backoff", "show")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "ATTEMPT  SINCE FIRST  DELAY AFTER",
        "      1           0s          10s",
        "      2          10s          30s",
        "      3          40s           1m",
        "      4        1m40s           2m",
        "      5        3m40s           3m",
        "      6        6m40s           4m",
        "      7       10m40s           5m",
        "      8       15m40s           6m",
        "      9       21m40s           7m",
        "     10       28m40s           8m",
        "     11       36m40s           9m",
        "     12       45m40s          10m",
        "     13       55m40s          20m",
        "     14     1h15m40s          30m",
        "     15     1h45m40s           1h",
        "     16     2h45m40s           2h",
        "     17     4h45m40s",
        "dead letter 4h45m40s after the first delivery: exhausted after 17 attempts",
    ]


def test_jitter_has_a_column() -> None:
    """The delays are those without it; how much it can add stands beside them."""
    result = run("backoff", "show", "--exponential", "5s..20s", "--jitter", "0.2", "--max-attempts", "4")
    assert result.stdout.splitlines() == [
        "ATTEMPT  SINCE FIRST  DELAY AFTER  WITH JITTER",
        "      1           0s           5s     up to 6s",
        "      2           5s          10s    up to 12s",
        "      3          15s          20s    up to 24s",
        "      4          35s",
        "dead letter 35s after the first delivery: exhausted after 4 attempts",
    ]


def test_the_table_ends_where_the_age_does() -> None:
    """The attempt that would come too late is named, and is no row."""
    result = run("backoff", "show", "--fixed", "20s", "--max-age", "1m")
    assert result.stdout.splitlines()[-2:] == [
        "      4           1m",
        "dead letter 1m after the first delivery: too old, attempt 5 would come more than 1m after it",
    ]


def test_the_policy_for_programs() -> None:
    """Stable keys, milliseconds, and the policy as it is stored; the option works before and after the command."""
    command = ("backoff", "show", "--table", "1s 2s", "--max-attempts", "3", "--jitter", "0.5", "--max-age", "1h")
    for arguments in ((*command, "-o", "json"), ("-o", "json", *command)):
        assert json.loads(run(*arguments).stdout) == {
            "policy": {"max_attempts": 3, "jitter": 0.5, "table_ms": [1000, 2000], "max_age_ms": HOUR},
            "attempts": [
                {"attempt": 1, "since_first_ms": 0, "delay_ms": 1000, "delay_max_ms": 1500},
                {"attempt": 2, "since_first_ms": 1000, "delay_ms": 2000, "delay_max_ms": 3000},
                {"attempt": 3, "since_first_ms": 3000, "delay_ms": None, "delay_max_ms": None},
            ],
            "dead_letter": {"reason": "EXHAUSTED", "since_first_ms": 3000},
        }


def test_one_attempt() -> None:
    """In the singular."""
    result = run("backoff", "show", "--max-attempts", "1")
    assert result.stdout.splitlines()[1:] == [
        "      1           0s",
        "dead letter 0s after the first delivery: exhausted after 1 attempt",
    ]


# -- simulate ----------------------------------------------------------------------------------------------------------


def test_a_run_for_people() -> None:
    """Each attempt with its time; what an attempt takes is added to the delay after it."""
    result = run(
        *("backoff", "simulate", "--table", "10s,30s, 1m", "--max-attempts", "5"),
        *("--start", "2026-01-31T12:00:00+02:00", "--processing", "1500ms"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "ATTEMPT  TIME                      SINCE FIRST  DELAY AFTER",
        "      1  2026-01-31T10:00:00.000Z           0s          10s",
        "      2  2026-01-31T10:00:11.500Z     11s500ms          30s",
        "      3  2026-01-31T10:00:43.000Z          43s           1m",
        "      4  2026-01-31T10:01:44.500Z   1m44s500ms           1m",
        "      5  2026-01-31T10:02:46.000Z        2m46s",
        "dead letter at 2026-01-31T10:02:47.500Z, 2m47s500ms after the first delivery: exhausted after 5 attempts",
    ]


def test_a_run_that_ends_too_old() -> None:
    """At the failure after which there is no attempt in time; the time that attempts take counts."""
    arguments = ("backoff", "simulate", "--fixed", "20s", "--max-age", "1m", "--start", str(START))
    assert run(*arguments).stdout.splitlines()[-1] == (
        "dead letter at 2026-01-31T10:01:00.000Z, 1m after the first delivery:"
        " too old, attempt 5 would come more than 1m after it"
    )
    assert run(*arguments, "--processing", "1ms").stdout.splitlines()[-1] == (
        "dead letter at 2026-01-31T10:00:40.003Z, 40s3ms after the first delivery:"
        " too old, attempt 4 would come more than 1m after it"
    )


def test_a_run_for_programs() -> None:
    """Stable keys, epoch milliseconds, the seed."""
    result = run(
        *("backoff", "simulate", "--fixed", "1s", "--max-attempts", "2", "--start", str(START)),
        *("--processing", "5ms", "--seed", "7", "-o", "json"),
    )
    assert json.loads(result.stdout) == {
        "policy": {"max_attempts": 2, "jitter": 0.0, "fixed_ms": 1000},
        "start_ms": START,
        "processing_ms": 5,
        "seed": 7,
        "attempts": [
            {"attempt": 1, "at_ms": START, "since_first_ms": 0, "delay_ms": 1000},
            {"attempt": 2, "at_ms": START + 1005, "since_first_ms": 1005, "delay_ms": None},
        ],
        "dead_letter": {"reason": "EXHAUSTED", "at_ms": START + 1010, "since_first_ms": 1010},
    }


def test_a_run_can_be_repeated() -> None:
    """A run with jitter says its seed, and that seed gives the same run; another one gives another."""
    arguments = ("backoff", "simulate", "--fixed", "1m", "--jitter", "1", "--start", str(START))
    first = run(*arguments).stdout
    said = first.splitlines()[0]
    assert said.startswith("jitter drawn with --seed ")
    seed = said.split()[-1]
    assert run(*arguments, "--seed", seed).stdout == first
    assert run(*arguments, "--seed", seed + "1").stdout.splitlines()[1:] != first.splitlines()[1:]


def test_jitter_is_in_the_delays_of_a_run() -> None:
    """Never less than the policy's delay, at most its share more, and the times are their sum."""
    result = run("backoff", "simulate", "--fixed", "1m", "--jitter", "0.1", "--start", str(START), "-o", "json")
    found = json.loads(result.stdout)["attempts"]
    delays_ms = [attempt["delay_ms"] for attempt in found[:-1]]
    assert len(set(delays_ms)) > 1
    assert all(60_000 <= delay_ms <= 66_000 for delay_ms in delays_ms)
    assert found[-1]["since_first_ms"] == sum(delays_ms)


def test_a_run_starts_now_by_default() -> None:
    """A distance is one from now."""
    arguments = ("backoff", "simulate", "--max-attempts", "1", "-o", "json")
    before = json.loads(run(*arguments).stdout)["start_ms"]
    later = json.loads(run(*arguments, "--start", "+1h").stdout)["start_ms"]
    after = json.loads(run(*arguments).stdout)["start_ms"]
    assert START - DAY < before <= later - HOUR <= after


def assert_refused(told: str, why: str) -> None:
    """One line that names the option or options, what was given to the one, and what is allowed."""
    names, _, allowed = why.partition(": ")
    options = [repr(name) for name in names.split(", ")]
    given = " .* is refused:" if len(options) == 1 and "goes with" not in why else ""
    assert re.match(f"dmq: Invalid value for {' / '.join(options)}:{given} {re.escape(allowed)}", told)
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--start", "tomorrow"), "--start: RFC 3339"),
        (("--start", "1769853600"), "--start: expected epoch milliseconds"),
        (("--start", "1969-12-31T23:59:59Z"), "--start: the time is before 1970"),
        (("--processing", "soon"), "--processing: a duration is expected"),
        (("--start", "9999-12-31T23:00:00Z"), "--start, --processing: the attempts would continue past the year 9999"),
        (("--processing", "3650000d"), "--start, --processing: the attempts would continue past the year 9999"),
        (("--start", "+3650000d"), "--start, --processing: the attempts would continue past the year 9999"),
    ],
)
def test_runs_that_cannot_be(arguments: tuple[str, ...], why: str) -> None:
    """One line that names the option, and the code for a usage error."""
    result = run("backoff", "simulate", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert_refused(result.stderr, why)


# -- the options of a policy -------------------------------------------------------------------------------------------

BASE = RetryPolicy(backoff=Exponential(1000, 9000, 3.0), max_attempts=5, jitter=0.5, max_age_ms=DAY)


def policy_of(base: RetryPolicy | None = None, **options: Any) -> RetryPolicy:  # noqa: ANN401 - as the options are
    return PolicyOptions(**options).applied_to(base)


def test_no_option_changes_nothing() -> None:
    """A command can tell that no option is given."""
    assert (PolicyOptions().are_given, PolicyOptions(jitter=0.0).are_given) == (False, True)
    assert (policy_of(), policy_of(base=BASE)) == (RetryPolicy(), BASE)


def test_options_make_a_policy() -> None:
    """Each by itself, on top of the default policy."""
    assert policy_of(table="10s 30s 1m") == RetryPolicy(backoff=Table((10_000, 30_000, 60_000)))
    assert policy_of(table=" 1s,2s , 3s,") == RetryPolicy(backoff=Table((1000, 2000, 3000)))
    assert policy_of(exponential="5s..2h") == RetryPolicy(backoff=Exponential(5000, 2 * HOUR, 2.0))
    assert policy_of(exponential="5s .. 2h", multiplier=1.5) == RetryPolicy(backoff=Exponential(5000, 2 * HOUR, 1.5))
    assert policy_of(fixed="30s") == RetryPolicy(backoff=Fixed(30_000))
    assert policy_of(max_attempts=3) == RetryPolicy(max_attempts=3)
    assert policy_of(jitter=0.0) == RetryPolicy()
    assert policy_of(max_age="3d") == RetryPolicy(max_age_ms=3 * DAY)


def test_an_omitted_option_is_that_of_the_base() -> None:
    """One option changes one thing; of a growing backoff the multiplier stays, and can be changed by itself."""
    kept = {"max_attempts": 5, "jitter": 0.5, "max_age_ms": DAY}
    exponential = {"initial_ms": 1000, "max_ms": 9000, "multiplier": 3.0}
    for given, expected in (
        (policy_of(base=BASE, fixed="1s"), kept | {"fixed_ms": 1000}),
        (policy_of(base=BASE, table="1s"), kept | {"table_ms": [1000]}),
        (
            policy_of(base=BASE, exponential="1ms..2ms"),
            kept | {"exponential": exponential | {"initial_ms": 1, "max_ms": 2}},
        ),
        (policy_of(base=BASE, multiplier=4), kept | {"exponential": exponential | {"multiplier": 4.0}}),
        (policy_of(base=BASE, max_attempts=9), kept | {"exponential": exponential, "max_attempts": 9}),
        (policy_of(base=BASE, jitter=0), kept | {"exponential": exponential, "jitter": 0.0}),
        (policy_of(base=BASE, max_age="1h"), kept | {"exponential": exponential, "max_age_ms": HOUR}),
        (policy_of(base=BASE, max_age="none"), kept | {"exponential": exponential, "max_age_ms": None}),
    ):
        assert given == from_plain(expected)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--table", "1s", "--fixed", "1s"), "--table, --fixed: give one of them only"),
        (("--table", "1s", "--exponential", "1s..2s"), "--table, --exponential: give one of them only"),
        (("--exponential", "1s..2s", "--fixed", "1s"), "--exponential, --fixed: give one of them only"),
        (("--multiplier", "2"), "--multiplier: a multiplier goes with --exponential only"),
        (("--multiplier", "2", "--fixed", "1s"), "--multiplier, --fixed: a multiplier goes with --exponential only"),
        (("--multiplier", "2", "--table", "1s"), "--multiplier, --table: a multiplier goes with --exponential only"),
        (("--exponential", "1s..2s", "--multiplier", "0.5"), "--multiplier: multiplier is 0.5, allowed is 1 to 100"),
        (("--exponential", "1s..2s", "--multiplier", "nan"), "--multiplier: multiplier is nan"),
        (("--table", "1s 5x"), "--table: a duration is expected, such as 500ms, 10s, 15m, 1h30m or 2d"),
        (("--table", "1s 367d"), "--table: at most 366d is allowed"),
        (("--table", ","), "--table: a table has 1 to 256 steps, not 0"),
        (("--exponential", "5s"), "--exponential: the first delay and the longest one are expected, such as 5s..2h"),
        (("--exponential", "5s.."), "--exponential: a duration is expected"),
        (("--exponential", "2h..5s"), "--exponential: the first delay is longer than the longest one"),
        (("--exponential", "0s..5s"), "--exponential: initial is 0, allowed is 1 to"),
        (("--exponential", "1s..367d"), "--exponential: at most 366d is allowed"),
        (("--fixed", "-5s"), "--fixed: a duration is expected"),
        (("--fixed", "367d"), "--fixed: at most 366d is allowed"),
        (("--max-attempts", "0"), "--max-attempts: max_attempts is 0, allowed is 1 to 1000"),
        (("--max-attempts", "1001"), "--max-attempts: max_attempts is 1001"),
        (("--jitter", "1.5"), "--jitter: jitter is 1.5, allowed is 0 to 1"),
        (("--jitter", "nan"), "--jitter: jitter is nan"),
        (("--max-age", "0s"), "--max-age: max_age is 0, allowed is 1"),
        (("--max-age", "3661d"), "--max-age: at most 3660d is allowed"),
        (("--max-age", "never"), "--max-age: a duration is expected"),
    ],
)
def test_policies_that_cannot_be(options: tuple[str, ...], why: str) -> None:
    """Both commands refuse them with one line that names the option; programs get it as JSON."""
    for command in ("show", "simulate"):
        result = run("backoff", command, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert_refused(result.stderr, why)
    error = error_of(run("backoff", "show", *options, "-o", "json"))
    assert error["kind"] == "usage"
    assert f"dmq: {error['message']}\n" == run("backoff", "show", *options).stderr


def test_a_multiplier_by_itself_needs_a_base_that_grows() -> None:
    """With another base it would be lost without a word."""
    with pytest.raises(typer.BadParameter, match="goes with --exponential"):
        policy_of(multiplier=2.0, base=RetryPolicy(backoff=Fixed(1)))
