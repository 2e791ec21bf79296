"""The table of docs/reference/commands.md has every command, and each behaves as stated, on good and bad input.

All of them ask one daemon, in this process, that wants an access key; spools, stores and trails are real ones too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from support.forges.messages.letters import a_message, die, fail
from support.forges.messages.stored import a_stored
from support.forges.trail.files import CellWriter, Event
from support.rigs.broker.rig import until
from support.rigs.commands.command_tree import keep
from support.rigs.commands.fake_admin_client import run_dmq
from support.rigs.commands.live_cell import NOW, LiveCell, live_cell
from support.rigs.daemon.acl import ACL, OPERATOR, write_acl
from support.rigs.rocketmq.remoting_peer import HeldQueue, remoting_peer
from typer.testing import Result

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.delay import DELIVER_AT_MS, INNER_GROUP, INNER_TOPIC, TOPIC
from dmq.cli.app import app
from dmq.cli.output.errors import ExitCode
from dmq.cluster.inner import InnerTopic
from dmq.producer_store.spool import Spool, SpoolOptions
from dmq.replication.lease import LEASE, LeaseRecord
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import open_objects
from dmq.store.store import Store, StoreOptions
from retry.sink import Death, Entry

ROOT = Path(__file__).parents[3]
NOBODY = "127.0.0.1:1"
STEP = "the clock is stepped"
TICK = "cron add tick orders x --every 1h"
FAR = "context add far --address far:1 --replace"
ALWAYS = {ExitCode.OK, ExitCode.FAILURE, ExitCode.USAGE, ExitCode.INTERRUPTED}
LATER = str(NOW + 3_600_000)


class Row(NamedTuple):
    """What the table says of a command."""

    changes: bool
    asks: bool
    has_json: bool
    codes: frozenset[int]  # beside those that every command may end with


@dataclass(frozen=True)
class Example:
    """How a command is called: so that it does well, and so that it ends with another code.

    ``good`` of a command that asks lacks ``--yes``; it is then about something. ``before`` makes what it needs. Where
    there is no good one, that is shown elsewhere.
    """

    good: str | None = None
    unknown: str = ""  # ends with 3
    part: str = ""  # ends with 7
    damaged: str = ""  # ends with 4
    in_use: str = ""  # ends with 6
    refused: str = ""  # ends with 5
    asking: str | None = None  # asks the daemon; by default the good one does
    before: tuple[str, ...] = ()
    code: int = 0  # of the good one


def uid(number: int) -> str:
    return f"{number:032x}"


# In this order, on one daemon.
EXAMPLES = {
    "config check": Example("--data {folder}/new --listen 127.0.0.1:0"),
    "config show": Example(""),
    "status": Example(""),
    "top": Example("--once --interval 100ms", asking="--once"),
    "check lag": Example(),
    "check late": Example(),
    "check disk": Example(),
    "check audit": Example(),
    "check replica": Example(),
    "ledger": Example("", unknown="nosuch"),
    "find": Example("D1", unknown="nosuch"),
    "tail": Example(unknown="nosuch", asking="orders"),
    "topic ls": Example(""),
    "topic show": Example("orders", unknown="nosuch"),
    "topic create": Example("made"),
    "topic set": Example("orders --deliver-rate 1000", unknown="nosuch --deliver-rate 7"),
    "topic pause": Example("refunds", unknown="nosuch"),
    "topic resume": Example("refunds", unknown="nosuch"),
    "topic rm": Example("full --force", unknown="nosuch", before=("msg send full x",)),
    "msg send": Example("orders x --id S --delay 1h"),
    "msg get": Example("orders W1", unknown="orders nosuch"),
    "msg recall": Example("orders --key k1", unknown="orders nosuch", part="orders W2 nosuch"),
    "msg reschedule": Example(
        f"orders --key k3 --at {LATER}",
        unknown=f"orders nosuch --at {LATER}",
        part=f"orders W3 nosuch --at {LATER}",
    ),
    "msg fire": Example("orders --key k4", unknown="orders nosuch", part="orders W5 nosuch"),
    "msg jobs": Example(""),
    "msg outcomes": Example("1", unknown="99", before=("msg fire orders --tag none --yes",)),
    "msg stop": Example("1", unknown="99", before=("msg fire orders --tag none --yes",)),
    "msg resume": Example("1", unknown="99", before=("msg fire orders --tag none --yes",)),
    "msg ls": Example("orders", unknown="nosuch"),
    "msg count": Example("orders", unknown="nosuch"),
    "msg peek": Example("orders", unknown="nosuch"),
    "cron add": Example("hourly orders x --every 1h"),
    "cron ls": Example("", unknown="--topic nosuch"),
    "cron show": Example("tick", unknown="nosuch", before=(TICK,)),
    "cron pause": Example("tick", unknown="nosuch", before=(TICK,)),
    "cron resume": Example("tick", unknown="nosuch", before=(TICK,)),
    "cron rm": Example("tick", unknown="nosuch", before=(TICK,)),
    "group ls": Example(""),
    "group show": Example("workers", unknown="nosuch"),
    "group pause": Example("workers", unknown="nosuch"),
    "group resume": Example("workers", unknown="nosuch"),
    "group set": Example("workers --deliver-rate 1000", unknown="nosuch --deliver-rate 7"),
    "group set-policy": Example("workers --max-attempts 7"),
    "group create": Example("made"),
    "retry ls": Example("workers", unknown="nosuch"),
    "retry stats": Example("", unknown="nosuch"),
    "retry run-now": Example(
        "workers --topic orders", unknown="workers --id nosuch", part="workers --id F2 --id nosuch"
    ),
    "retry to-dead": Example("workers --topic refunds", unknown="workers --id nosuch", part="workers --id G1 --id x"),
    "dead groups": Example(""),
    "dead ls": Example("workers", unknown="nosuch"),
    "dead show": Example("workers D1", unknown="workers nosuch"),
    "dead export": Example("workers --out {out}/dead.jsonl", unknown="nosuch"),
    "dead redrive": Example(
        "workers --key k1", unknown="workers --to nosuch --yes", part="workers --id D2 --id nosuch"
    ),
    "dead purge": Example(
        "workers --key k3 --why old", unknown="workers --id nosuch --why old", part="workers --id D4 --id x --why old"
    ),
    "dead jobs": Example(""),
    "dead stop": Example("1", unknown="99", before=("dead redrive workers --key none --yes",)),
    "dead resume": Example("1", unknown="99", before=("dead redrive workers --key none --yes",)),
    "group reset": Example("workers orders --to begin", unknown="workers nosuch --to end"),
    "group rm": Example("workers --force", unknown="nosuch"),
    "client ls": Example(""),
    "client stack": Example("nosuch", unknown="nosuch", code=3),
    "client verify": Example("nosuch orders S", unknown="nosuch orders S", code=3),
    "activity ls": Example(""),
    "activity show": Example("1", unknown="9999", before=("quota set key reader topics 7",)),
    "quota ls": Example(""),
    "quota set": Example("key shop topics 7"),
    "quota unset": Example("key shop topics"),
    "replay": Example(
        f"--since {NOW - 60_000} --until {NOW} --namesrv {{peer}}", part=f"--since {NOW} --namesrv {{peer}} --yes"
    ),
    "clock show": Example(""),
    "backoff show": Example("", asking="--group workers", unknown="--group nosuch"),
    "backoff simulate": Example(f"--seed 1 --start {NOW}", asking="--group workers", unknown="--group nosuch"),
    "broker routes": Example(
        "dmq_inner_topic --namesrv {peer}",
        unknown="nosuch --namesrv {peer}",
        in_use=f"orders --namesrv {NOBODY} --timeout 1s",
    ),
    "spool ls": Example("--root {spool}", unknown="--root {folder}", damaged="--root {damaged}"),
    "spool show": Example(
        f"{uid(1)} --root {{spool}}", unknown=f"{uid(99)} --root {{spool}}", damaged=f"{uid(99)} --root {{damaged}}"
    ),
    "spool stats": Example("--root {spool}", unknown="--root {folder}"),
    "spool check": Example("--root {spool}", unknown="--root {folder}", damaged="--root {damaged}"),
    "spool export": Example(
        "--root {spool} --out {out}/entries.jsonl", unknown="--root {folder}", damaged="--root {damaged}"
    ),
    "spool requeue": Example(
        "--all --root {spool}",
        unknown=f"{uid(99)} --root {{spool}}",
        part=f"{uid(1)} {uid(99)} --root {{other}}",
        damaged="--all --yes --root {ruin}",
        in_use=f"{uid(99)} --root {{used}}",
    ),
    "spool adopt": Example(
        "--root {folder}/adopted --from {spool}",
        unknown="--root {folder}",
        damaged="--root {folder}/a --from {ruin} --yes",
    ),
    "spool salvage": Example("--root {damaged}", unknown="spool-none --root {other}", in_use="{in_use} --root {used}"),
    "store check": Example("{store}", unknown="{folder}/nosuch", in_use="{used}/{in_use}"),
    "store salvage": Example(
        "{store} {folder}/saved", unknown="{folder}/nosuch {folder}/saved2", in_use="{used}/{in_use} {folder}/saved3"
    ),
    "store backup": Example(
        "{folder}/copy --data {store}", unknown="{folder}/copy2 --data {folder}/nosuch", asking="{folder}/copy3"
    ),
    "replica status": Example(unknown=" ", asking=""),
    "replica check": Example("--replica-url file://{replica}", damaged="--replica-url file://{folder}"),
    "replica promote": Example("--replica-url file://{replica}", unknown="--replica-url file://{trail}"),
    "replica restore": Example(
        "--replica-url file://{replica} --data {folder}/restored",
        damaged="--replica-url file://{folder} --data {folder}/restored2",
    ),
    "audit ls": Example("--trail {trail}", unknown="--trail {folder}/nosuch", asking=""),
    "context add": Example("far --address far:1"),
    "context ls": Example(""),
    "context show": Example("far", unknown="nosuch", before=(FAR,)),
    "context use": Example("near", unknown="nosuch", before=(FAR, "context add near --address near:1 --replace")),
    "context rm": Example("far", unknown="nosuch", before=(FAR,)),
    "acl ls": Example("--file {acl}"),
    "acl check": Example(
        "operator PUB topic:x --file {acl}",
        unknown="nosuch PUB topic:x --file {acl}",
        refused="reader PUB topic:x --file {acl}",
    ),
    "acl new": Example(""),
    "clock accept": Example("", before=(STEP,)),
    "serve": Example(),
    "http-api": Example(),
    "console": Example(),
    "demo": Example(),
    "broker queues": Example(in_use=f"orders --namesrv {NOBODY} --timeout 1s"),
    "broker offsets": Example(in_use=f"workers --namesrv {NOBODY} --timeout 1s"),
    "broker consumers": Example(in_use=f"workers --namesrv {NOBODY} --timeout 1s"),
    "audit run": Example(unknown="--out {out}/audit --trail {folder}/nosuch", asking="--out {out}/audit"),
    "audit explain": Example(unknown="A --trail {folder}/nosuch", asking="A"),
    "audit snapshot": Example(unknown="--data {folder}/nosuch --trail {out}/trail", asking=""),
    "audit export": Example(
        unknown="--data {folder}/nosuch --trail {out}/trail", in_use="--data {used}/{in_use} --trail {out}/trail"
    ),
}
# Shown where the rest of it is: commands that are or need another process, and what damage brings.
ELSEWHERE = {
    "replica status": "tests/dmq/daemon/replica/test_replica_loss.py",
    "serve": "tests/dmq/cli/service/test_serve.py",
    "http-api": "tests/dmq/http_api/test_process.py",
    "console": "tests/dmq/console/test_app.py",
    "demo": "tests/system/test_demo.py",
    "broker offsets": "tests/dmq/cli/messages/test_broker.py",
    "broker consumers": "tests/dmq/cli/messages/test_broker.py",
    "broker queues": "tests/dmq/cli/messages/test_broker.py",
    "audit explain": "tests/dmq/cli/trail/test_audit.py",
    "audit run": "tests/dmq/cli/trail/test_audit.py",
    "audit snapshot": "tests/dmq/cli/trail/test_audit.py",
    "audit export": "tests/dmq/cli/trail/test_audit.py",
    "tail": "tests/dmq/cli/messages/test_tail.py",
    "check lag": "tests/dmq/cli/service/test_check.py",
    "check late": "tests/dmq/cli/service/test_check.py",
    "check disk": "tests/dmq/cli/service/test_check.py",
    "check audit": "tests/dmq/cli/service/test_check.py",
    "check replica": "tests/dmq/cli/service/test_check.py",
}
# The exit codes of these are those of Nagios, and their errors are for its users.
PLUGINS = frozenset(name for name in EXAMPLES if name.startswith("check "))
CODES_ELSEWHERE = {
    ("ledger", 4): "tests/dmq/cli/trail/test_ledger.py",
    ("dead export", 4): "tests/dmq/cli/messages/test_dead.py",
    ("store check", 4): "tests/dmq/recovery/check/test_check.py",
    ("store salvage", 4): "tests/dmq/recovery/salvage/test_salvage.py",
    ("spool salvage", 4): "tests/dmq/cli/service/test_spool_in_process.py",
    ("msg send", 3): "tests/dmq/cli/messages/test_msg.py",
    ("broker queues", 3): "tests/dmq/cli/messages/test_broker.py",
    ("broker offsets", 3): "tests/dmq/cli/messages/test_broker.py",
    ("replica check", 6): "tests/dmq/daemon/replica/test_replica_loss.py",
    ("replica promote", 6): "tests/dmq/daemon/replica/test_replica_loss.py",
    ("replica restore", 6): "tests/dmq/daemon/replica/test_replica_loss.py",
    ("client stack", 6): "tests/dmq/cli/objects/test_client.py",
}


class World:
    """A daemon that wants an access key, and what lies in folders."""

    def __init__(self, live: LiveCell, folder: Path, places: dict[str, object]) -> None:
        self.live, self._folder, self._places = live, folder, places

    def run(
        self, name: str, arguments: str, *more: str, address: str = "", env: dict[str, str] | None = None
    ) -> Result:
        """Run a command as the operator, or with another environment; it asks the daemon, or another one."""
        given = arguments.format_map({key: str(value) for key, value in self._places.items()})
        at = ("--address", address or self.live.cell.listen)
        return run_dmq(*at, *name.split(), *given.split(), *more, env=env)

    def state(self) -> tuple[int, int, dict[str, int]]:
        """What changes when something is changed: the record of operators' changes, what waits, and files.

        Not those of the spool that is in use: it writes there when it likes.
        """
        recorded = json.loads(self.run("activity ls", "-o json").stdout)
        newest = next((each for each in recorded if not each["rpc"].startswith(("Get", "List", "Peek"))), {"number": 0})
        files = {
            str(path.relative_to(self._folder)): (found := path.stat()).st_size + found.st_mtime_ns
            for path in self._folder.rglob("*")
            if path.is_file() and path.name not in {"LOCK", "ADOPT", "rocksdict-config.json"}
            if self._folder / "used" not in path.parents
        }
        return newest["number"], sum(self.live.rig.store.pending().values()), files


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One daemon for all, with messages that wait, retries and dead letters; spools, a store and a trail."""
    base = tmp_path_factory.mktemp("world")
    folder, out = base / "folder", base / "out"
    folder.mkdir()
    out.mkdir()
    acl = write_acl(base, f'signature_window = "none"\n{ACL}')
    make_spools(folder)
    Store.open(folder / "store", SystemClock(), StoreOptions(ballast_bytes=0)).close()
    (folder / "replica").mkdir()
    objects = open_objects(f"file://{folder}/replica")
    objects.replace(LEASE, LeaseRecord("a", "host:8081", 1, 10_000, 1, is_bound=True).encode(), None)
    log = ReplicationLog(objects, SystemClock(), LogOptions(is_sync=True), lambda _: 0)
    Store.open(out / "replicated", SystemClock(), StoreOptions(ballast_bytes=0), log).close()
    writer = CellWriter(folder / "trail", "cell-1")
    writer.add(Event(1, 1, "ACCEPTED", NOW, topic="orders", message_id=b"A"))
    writer.close()
    used = Spool(folder / "used", options=SpoolOptions(adopt_every_s=0))
    with (
        pytest.MonkeyPatch.context() as patch,
        remoting_peer() as peer,
        live_cell(base / "data", acl=acl) as live,
    ):
        patch.setenv("DMQ_ACCESS_KEY", OPERATOR.access_key)
        patch.setenv("DMQ_SECRET_KEY", OPERATOR.secret_key)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setattr("dmq.cli.messages.replay._PAUSES_S", (0.0,))
        patch.setattr("broker_adapter.remoting.client._PAUSES_S", (0.0,))
        fill(live)
        peer.topics[INNER_TOPIC] = [HeldQueue([inner(0, -30_000), inner(1, 1_000), inner(2, 2_000, crc=1)])]
        places = {
            name: folder / name for name in ("spool", "other", "damaged", "ruin", "used", "store", "trail", "replica")
        }
        named = {"folder": folder, "out": out, "acl": acl, "peer": peer.address, "in_use": used.path.name}
        yield World(live, folder, places | named)
    used.close()


def make_spools(folder: Path) -> None:
    """One with dead entries, copies of it, and damaged ones."""
    with Spool(folder / "spool", options=SpoolOptions(adopt_every_s=0)) as spool:
        for number in (1, 2):
            spool.put(
                Entry(type_name="t", uid=bytes.fromhex(uid(number)), payload=b"x", created_at_ms=1, due_at_ms=1)
            ).result(10)
            (held,) = spool.take("t", 1, 10)
            spool.bury(held, Death.PERMANENT, "no").result(10)
    for name in ("other", "damaged", "ruin"):
        shutil.copytree(folder / "spool", folder / name)
    for name in ("damaged", "ruin"):
        (directory,) = (folder / name).glob("spool-*")
        (directory / "rocksdb" / "CURRENT").unlink()


def inner(offset: int, since_ms: int, crc: int | None = None) -> Any:  # noqa: ANN401 - what a broker stores
    """A message of the inner topic."""
    properties = {TOPIC: "orders", DELIVER_AT_MS: str(NOW + 86_400_000)}
    return a_stored(
        topic=INNER_TOPIC,
        message_id=f"I{offset}",
        properties=properties,
        offset=offset,
        stored_at_ms=NOW + since_ms,
        crc=crc,
    )


def fill(live: LiveCell) -> None:
    """Messages W1 to W6 that wait, retries F1 to F3 and G1, G2, dead letters D1 to D4; keys are k and the number."""
    rig = live.rig

    async def work() -> None:
        await die(rig, *(a_message(f"D{number}", keys=(f"k{number}",)) for number in range(1, 5)), group="workers")
        await fail(rig, "F1", "F2", "F3", group="workers")
        await fail(rig, "G1", "G2", group="workers", topic="refunds")
        for number in range(1, 7):
            due = NOW + 3_600_000
            await rig.broker.send([a_message(f"W{number}", keys=(f"k{number}",), deliver_at_ms=due)])

    live.do(work())
    live.cell.inner = InnerTopic(
        None,  # type: ignore[arg-type]  # nothing is fetched
        rig.broker,
        rig.store.clock,
        topic=INNER_TOPIC,
        group=INNER_GROUP,
        levels_ms=(1_000,),
        delay_max_ms=None,
    )


def step(live: LiveCell) -> None:
    """Step the clock, and have what happens to it recorded, which is the scheduler's part."""
    live.rig.clock.pass_by(wall_ms=3_600_000)
    live.do(live.rig.settle())

    async def record() -> None:
        await until(lambda: live.rig.store.clock.has_news)
        await live.rig.settle()

    live.before_call(lambda name: live.begin(record()) if name == "AcceptClock" else None)


def error_of(result: Result) -> dict[str, Any]:
    """The error for programs: the last line, behind what was noted."""
    found: dict[str, Any] = json.loads(result.stderr.splitlines()[-1])["error"]
    return found


def commands() -> dict[str, Any]:
    """Every command that the help shows, as it is parsed."""
    keep()

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - of typer's vendored classes
        below = getattr(command, "commands", None)
        if below is None:
            yield name, command
            return
        for each in below:
            if not below[each].hidden:
                yield from walk(below[each], f"{name} {each}".strip())

    return dict(walk(typer.main.get_command(app), ""))


def options_of(name: str) -> set[str]:
    """The options of a command."""
    return {option for parameter in commands()[name].params for option in parameter.opts}


def rows() -> dict[str, Row]:
    """The table of the page."""
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([a-z -]+)` \| (yes|no) \| (yes|no) \| (yes|no) \| ([0-9 ]*)\|$", text, re.MULTILINE)
    return {
        name: Row(changes == "yes", asks == "yes", has_json == "yes", frozenset(map(int, codes.split())))
        for name, changes, asks, has_json, codes in found
    }


def test_every_command_has_a_row_and_an_example() -> None:
    """In the order of the help; what is run elsewhere is named there."""
    assert list(rows()) == list(commands())
    assert set(EXAMPLES) == set(commands())
    assert {name for name, example in EXAMPLES.items() if example.good is None} == set(ELSEWHERE)
    for (name, _), path in [*CODES_ELSEWHERE.items(), *((((name, 0)), path) for name, path in ELSEWHERE.items())]:
        assert name.split()[-1] in (ROOT / path).read_text(encoding="utf-8"), name


def test_no_summary_of_a_command_is_cut() -> None:
    """Not even in the help of its group at a terminal of 80 columns."""
    groups = {name.split()[0] for name in commands() if " " in name}
    assert len(groups) > 10
    for name in ("", *sorted(groups)):
        summaries = run_dmq(*name.split(), "--help", env={"COLUMNS": "80"}).stdout.partition("Commands:")[2]
        assert summaries
        assert "..." not in summaries, name


@pytest.mark.parametrize("name", list(commands()))
def test_the_options_are_those_of_the_row(name: str) -> None:
    """What asks has a dry run and a yes, what changes a daemon a reason, JSON both forms, a limit its letter."""
    row, options = rows()[name], options_of(name)
    assert row.asks == ("--yes" in options) == ("--dry-run" in options) == ("-y" in options)
    assert row.has_json == ("--output" in options) == ("--json" in options)
    assert row.changes or not (row.asks or "--why" in options)
    without_reason = {"msg send", "audit snapshot", "context add"}  # kept by no operator's record, or asking no daemon
    assert ("--why" in options) == (row.changes and "--address" in options and name not in without_reason)
    assert ("--limit" in options) == ("-n" in options)
    assert "--number" not in options


@pytest.mark.parametrize("name", [name for name in commands() if name not in PLUGINS])
def test_a_wrong_option_is_wrong_usage(name: str) -> None:
    """Of every command, and as JSON if that is asked for."""
    result = run_dmq(*name.split(), "--no-such", "--json")
    assert (result.exit_code, result.stdout, error_of(result)["kind"]) == (2, "", "usage")


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in PLUGINS])
def test_a_command_does_its_row_of_the_table(world: World, name: str) -> None:
    """Its exit codes with good and with bad input, its JSON, what it asks about, whether it changes something."""
    row, example = rows()[name], EXAMPLES[name]
    known = {code for each, code in CODES_ELSEWHERE if each == name}
    if STEP in example.before:
        step(world.live)
    for each in (each for each in example.before if each != STEP):
        command, _, arguments = each.partition(" ")
        assert world.run(command, arguments).exit_code == 0
    yes = ("--yes",) if row.asks else ()
    good = example.good or ""
    asking = good if example.asking is None else example.asking
    bad = {3: example.unknown, 4: example.damaged, 5: example.refused, 6: example.in_use, 7: example.part}
    for code, arguments in bad.items():
        if arguments:
            result = world.run(name, arguments, "--json")
            assert result.exit_code == code, result.stderr
            assert code == 5 or error_of(result)["exit_code"] == code
            known.add(code)
    if "--address" in options_of(name) and name not in {"context add", "http-api", "console"}:
        before = world.state()
        result = world.run(name, asking, *yes, "--timeout", "2s", "--json", address=NOBODY)
        assert (result.exit_code, error_of(result)["kind"]) == (6, "unavailable"), result.stderr
        result = world.run(name, asking, *yes, "--json", env={"DMQ_ACCESS_KEY": "", "DMQ_SECRET_KEY": ""})
        assert (result.exit_code, error_of(result)["kind"]) == (5, "not_allowed"), result.stderr
        assert world.state() == before
        known |= {5, 6}
    assert known - ALWAYS == row.codes
    if example.good is None:
        return
    before = world.state()
    if row.asks:
        result = world.run(name, good, "--json")
        assert (result.exit_code, result.stdout, "use --yes" in result.stderr) == (2, "", True), result.stderr
        result = world.run(name, good, "--dry-run", "--json")
        assert (result.exit_code, type(json.loads(result.stdout))) in {(0, dict), (0, list)}, result.stderr
        assert world.run(name, good, "--dry-run").stdout
        assert world.state() == before
    result = world.run(name, good, *yes, *(("--json",) if row.has_json else ()))
    assert result.exit_code == example.code, result.stderr
    if not example.code:
        told = json.loads(result.stdout)
        if not row.changes:
            again = json.loads(world.run(name, good, "-o", "json").stdout)
            assert (type(again), again.keys() if isinstance(again, dict) else 0) == (
                type(told),
                told.keys() if isinstance(told, dict) else 0,
            )
    after = world.state()
    assert (after != before) == row.changes, after[2].items() ^ before[2].items()
