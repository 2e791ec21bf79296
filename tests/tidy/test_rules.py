"""Every tidy rule reports what it is there for, and leaves alone what is allowed."""

from __future__ import annotations

import pytest
from tidy import rules

pytestmark = pytest.mark.tidy

HEAD = '"""A module."""\n\nfrom __future__ import annotations\n\n'


def check(path: str, code: str) -> list[str]:
    return [finding.what for finding in rules.check_python(path, HEAD + code)]


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("dmq/store/engines/rocks.py", "for key in family.keys(): pass", "`.keys` ends silently"),
        ("dmq/store/engines/rocks.py", "rows = list(family.items())", "`.items` ends silently"),
        ("dmq/store/engines/rocks.py", "rows = map(len, family.values())", "`.values` ends silently"),
        ("bench/floor.py", "import rocksdict\nrocksdict.Rdict('x').items()", "`.items` ends silently"),
        ("tests/system/test_x.py", "from rocksdict import Rdict\nRdict('x').keys()", "`.keys` ends silently"),
        ("dmq/store/engines/rocks.py", "options.set_iterate_lower_bound(b'')", "sets the upper bound"),
        ("tests/dmq/test_x.py", "options.set_iterate_lower_bound(b'')", "sets the upper bound"),
        ("dmq/runtime/log.py", "import time", "`time` reads a clock"),
        ("dmq/runtime/log.py", "import os, time as t", "`time` reads a clock"),
        ("retry/flow.py", "from time import monotonic", "`time` reads a clock"),
        ("retry/api.py", "import time\ntime.monotonic()", "`time.monotonic` reads a clock"),
        ("broker_adapter/queue_client/balance.py", "def f():\n    import time", "`time` reads a clock"),
        ("dmq/demo.py", "import time", "`time` reads a clock"),
        ("spark_audit/jobs.py", "datetime.now(tz=UTC)", "`now` reads a clock"),
        ("dmq/store/engines/rocks.py", "datetime.datetime.utcnow()", "`utcnow` reads a clock"),
        ("dmq/scheduler/loop.py", "asyncio.get_running_loop().time()", "`time()` reads a clock"),
        ("dmq/rocketmq_server/map.py", "Timestamp().GetCurrentTime()", "`GetCurrentTime` reads a clock"),
        ("dmq/daemon.py", "print('up')", "print; log it"),
        ("broker_adapter/runtime/clock.py", "print('tick')", "print; log it"),
        ("dmq/x.py", "def f():\n" + "    x = 1\n" * 70, "f has 71 lines"),
        ("dmq/x.py", "class C:\n    async def f(self):\n" + "        x = 1\n" * 70, "f has 71 lines"),
        ("dmq/x.py", "\n".join(f"from dmq.m{each} import x" for each in range(33)), "imports 33 of our modules"),
        ("tests/dmq/test_x.py", "\n".join(f"def f{each}(): ..." for each in range(41)), "defines 41 public names"),
    ],
)
def test_a_breach_is_reported(path: str, code: str, expected: str) -> None:
    (finding,) = check(path, code)
    assert expected in finding


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("dmq/store/engines/memory.py", "rows = table.items()"),
        ("tests/dmq/test_rocksdict_traps.py", "import rocksdict\nrows = db.items()"),
        ("tests/dmq/test_rocksdict_traps.py", "options.set_iterate_lower_bound(b'')"),
        ("dmq/store/engines/rocks.py", '"""Never set_iterate_lower_bound, never items()."""'),
        ("broker_adapter/runtime/clock.py", "import time\ntime.time_ns()"),
        ("retry/api.py", "import time\ntime.sleep(1)"),
        ("tests/dmq/test_x.py", "import time\ntime.monotonic()"),
        ("bench/x.py", "import time\ntime.perf_counter()"),
        ("dmq/runtime/log.py", "import datetime\nx = datetime.datetime.fromtimestamp(0, tz=datetime.UTC)"),
        ("dmq/runtime/log.py", "import timeit_like\nfrom clock import now_ms"),
        ("dmq/demo.py", "print('done')"),
        ("dmq/cli/main.py", "print('done')"),
        ("dmq/x.py", "def f():\n" + "    x = 1\n" * 69),
        ("dmq/x.py", "x = 1\n" * 396),
    ],
)
def test_allowed_code_is_not_reported(path: str, code: str) -> None:
    assert check(path, code) == []


def test_a_module_needs_a_docstring_and_the_future_import() -> None:
    assert [finding.what for finding in rules.check_python("dmq/x.py", "x = 1\ny = 2\n")] == [
        "a module without `from __future__ import annotations`",
        "a module without a docstring",
    ]
    assert rules.check_python("dmq/x.py", "") == []
    assert rules.check_python("dmq/x.py", "\n") == []
    assert rules.check_python("dmq/x.py", '"""Only words."""\n') == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# TO" + "DO: later", "unfinished work"),
        ("// FIX" + "ME", "unfinished work"),
        ("XX" + "X", "unfinished work"),
        ("--index-url https://py" + "pi.org/simple", "registry host"),
        ("https://files.python" + "hosted.org/packages/a", "registry host"),
        ('"resolved": "https://registry.npm' + 'js.org/a"', "registry host"),
        ("https://repo." + "maven.apache.org/maven2", "registry host"),
        ("--find-links /opt/" + "wheels", "path of one machine"),
        ("cd /home/" + "somebody/project", "path of one machine"),
        ("cd '/ro" + "ot/x'", "path of one machine"),
        ("path = /wo" + "rk/main", "path of one machine"),
        ("open('/Users/" + "me/x')", "path of one machine"),
    ],
)
def test_a_text_that_must_not_be_there_is_reported(line: str, expected: str) -> None:
    (finding,) = rules.check_text("docs/x.md", f"first line\n{line}\n")
    assert expected in finding.what
    assert finding.line == 2


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("docs/x.md", "a todo list, /var/lib/dmq, ./wo" + "rk/x, dmq/root/x, https://example.org/ho" + "me/me/"),
        ("docs/x.md", "the RocketMQ repository on Maven Central; crates and wheels"),
        ("locks/run.txt", "--hash=sha256:XX" + "X"),
        ("tests/clients/node/package-lock.json", '"integrity": "sha512-a/XX' + 'X+b=="'),
    ],
)
def test_innocent_text_is_not_reported(path: str, line: str) -> None:
    assert rules.check_text(path, line) == []
