"""Each block of code on each page is run, in the order in which it stands there, as a reader would.

``NOT_RUN`` is all that is not, each with its reason; it is looked at as far as that goes. A block that is new is run by
itself. If a reader needs something beforehand that the page does not give him, it is made in ``BEFORE``.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clients.documentation.pages import ROOT, Block, arguments, blocks, commands, pages
from support.clients.documentation.reader import Reader
from support.clients.java.jvm import SHORT_LIVED
from support.clients.official.builds import CLIENTS
from support.clients.official.client import JAVA, require
from support.effort import at_length
from support.rigs.daemon.acl import ACL, HOOK
from support.rigs.daemon.process import free_port, run_command

from broker_adapter.contracts.message import Message
from broker_adapter.wire.delay import INNER_TOPIC, unwrap
from broker_adapter.wire.mapping import encode
from dmq import Delivered, Spool, Spooled

pytestmark = pytest.mark.integration
_IS_DRAWN = "a drawing"
_IS_SUM = "an equation"
_OF_MAKE = "a target of make, in a checkout"
_IN_FRONT = "needs an Apache RocketMQ cluster: tests/dmq/cluster::test_the_examples_of_the_documentation_run"
_TWO_DAEMONS = "needs two hosts: tests/dmq/cluster::test_two_daemons_in_front_of_one_cluster"
# By page and how their first lines begin. A test that is named runs it, or the like of it.
NOT_RUN = {
    "CONTRIBUTING.md": {"make lint      #": _OF_MAKE, "make coverage": _OF_MAKE, "make test ARGS": _OF_MAKE},
    "README.md": {
        "python3 -m venv": "installs 400 MB: tests/system::test_the_first_screen",
    },
    "dmq/http2/README.md": {"server = Http2Server(": "a piece of a server"},
    "docs/explanation/architecture.md": {
        "official RocketMQ 5 clients": _IS_DRAWN,
    },
    "docs/how-to/audit.md": {
        "scheduled = fired": _IS_SUM,
        "fired = acked": _IS_SUM,
        "dmq audit run --out audit --cluster": "a cluster: tests/dmq/trail::test_a_topic_is_read_back_as_it_was_sent",
        "sent = there": _IS_SUM,
        "dmq audit run --master": "needs clusters of Spark: tests/dmq/cli::test_a_cluster_gets_the_package",
        "dmq audit run --out audit --retired-cell": "needs a lost cell: tests/dmq/cli::test_a_cell_can_be_retired",
    },
    "docs/how-to/console.md": {
        "state:waiting": "a query",
        "pip install": "serves: tests/dmq/daemon::test_a_console_is_started_again_and_ends_with_its_daemon",
    },
    "docs/reference/clients.md": {"import java.time.Duration": "needs Java: tests/system::test_the_example_in_java"},
    "docs/how-to/rocketmq-cluster.md": {
        "message = Message()": _IN_FRONT,
        "Message message =": _IN_FRONT,
        "msg := ": _IN_FRONT,
        "from broker_adapter import connect": _IN_FRONT,
        "$ dmq config check --broker": "needs a cluster: tests/dmq/daemon::test_an_endpoint_that_is_no_proxy_is_named",
        "$ dmq msg send orders 'proof": "needs a cluster: tests/dmq/cluster::test_all_arrive_while_both_are_killed",
        "dmq serve --broker rocketmq --endpoints 10.0.0.1:8081 --listen": _TWO_DAEMONS,
        "producer = Producer(ClientConfiguration": _TWO_DAEMONS,
        "cp -r /mnt": "needs trails of two hosts, and a cluster",
        '{"topic": "orders"': "what another program sends",
        "dmq replay": "needs a cluster: tests/dmq/trail::test_a_disk_is_gone_and_the_audit_looks_at_the_cluster",
    },
    "docs/reference/commands.md": {
        "dmq serve": "a list and no program: tests/tidy::test_the_page_of_commands_has_each_of_them_once",
    },
    "docs/how-to/deploy.md": {
        "DMQ_COMPILED=1 python -m hatchling": "needs a clone: tests/system::test_a_compiled_wheel_serves_compiled",
        "python3.11 -m venv": "installs for all users, needs systemd: tests/system::test_the_unit_is_one",
        "docker build": "needs Docker: tests/system::test_the_image_is_described_without_a_complaint",
        "DMQ_BROKER=rocketmq": "needs Docker: tests/system::test_the_compose_file_is_one",
        "kubectl create": "needs Kubernetes: tests/system::test_kubernetes_takes_it",
        "kubectl apply": "needs Kubernetes: tests/system::test_the_service_of_a_pair_leads_to_the_primary",
    },
    "docs/how-to/notifications.md": {
        "(umask 077": "writes into /etc",
        '{"type": "rockdmq': "what a receiver gets",
    },
    "docs/how-to/operations.md": {
        "dmq top                 ": "lasts until Ctrl-C: tests/dmq/cli::test_the_figures_of_a_daemon",
        "DMQ LATE OK": "an output",
        "define command": "a part of a file of Nagios",
        "dmq check lag": "needs a group and a second copy: tests/dmq/cli::test_the_status_of_a_daemon",
    },
    "docs/how-to/tracing.md": {
        "pip install": "serves: tests/dmq/daemon::test_the_trace_of_an_order_is_the_tree_that_a_person_expects",
        "properties = {}": "a piece of a producer",
        "send orders": _IS_DRAWN,
        "receivers:": "a part of a file of a collector",
    },
    "docs/how-to/producer-hook.md": {
        'topics = { "redelivery_*"': "a part of a file: tests/system::test_the_sidecar_client_signs",
        "200 messages/s": _IS_SUM,
        "def post_fork": "needs gunicorn",
        "# confluent-kafka": "needs Kafka, RabbitMQ and a server of HTTP",
    },
    "docs/how-to/frameworks.md": {
        "transaction.on_commit": "a line of a view: tests/system::test_django_under_gunicorn",
        "from celery import": "a piece: tests/system::test_a_celery_worker_starts_and_ends_the_hook_of_its_pool",
        "pip install rock-dmq 'rocketmq": "another project's package",
        "from dmq.integrations.consumer": "goes on for ever: tests/system::test_a_function_consumes",
        "try:": "a piece of a handler: tests/dmq/integrations::test_a_message_is_acknowledged_tried_again_or_dead",
    },
    "docs/how-to/queue-clients.md": {
        "$ dmq broker": "needs a cluster: tests/dmq/cli::test_members_report_their_queues_and_lags_are_shown",
        "broker = await connect": "needs a cluster: tests/broker_adapter::test_environments_never_see_each_other",
    },
    "docs/how-to/replication.md": {"dmq replica restore": "a list of three ways, and the last one serves"},
    "docs/how-to/replication-s3.md": {"export AWS_REGION": "needs AWS"},
    "docs/how-to/replication-on-premises.md": {
        "export AWS_ENDPOINT_URL": "needs a server: tests/dmq/daemon::test_an_object_server_that_is_down_holds_writes"
    },
    "docs/how-to/replication-directory.md": {
        "dmq serve": "an absolute path: tests/dmq/daemon::test_no_acknowledged_message_is_lost_with_the_disk",
        "objects.example": "a line of /etc/fstab",
    },
    "docs/explanation/testing.md": {
        "make test": _OF_MAKE,
        "unshare -rn": "runs all tests",
        "make disturb": _OF_MAKE,
        "make mutants": _OF_MAKE,
    },
    "docs/reference/trail.md": {"<trail>/": _IS_DRAWN},
    "docs/tutorial/index.md": {"python3 -m venv": "installs 400 MB: tests/system::test_the_first_screen"},
}
# Pages whose Python blocks are pieces of one program.
PIECES = {"docs/how-to/producer-hook.md"}
_Step = Callable[[Reader], None]
BEFORE: dict[tuple[str, str], _Step] = {}
AFTER: dict[tuple[str, str], _Step] = {}


def before(page: str, part: str) -> Callable[[_Step], _Step]:
    """Do something before each block of that page with this in it."""

    def put(step: _Step) -> _Step:
        BEFORE[page, part] = step
        return step

    return put


def after(page: str, part: str) -> Callable[[_Step], _Step]:
    """Look at what is there once such a block is done."""

    def put(step: _Step) -> _Step:
        AFTER[page, part] = step
        return step

    return put


# -- what pages take for granted, and what is to come of their blocks --------------------------------------------------


@before("docs/how-to/access-keys.md", "dmq context add")
def _(reader: Reader) -> None:
    """A daemon with these keys, whose certificate the reader has."""
    reader.serve("--acl", "acl.toml")
    reader.shell("cp dmq-data/tls/certificate.pem ca.pem")
    reader.instead["dmq.example:8081"] = reader.address
    reader.env = {key: value for key, value in reader.env.items() if key != "DMQ_ADDRESS"}
    reader.env |= {"DMQ_ACCESS_KEY": "operator", "DMQ_SECRET_KEY": "..."}
    reader.shell(f"dmq topic create orders-eu --address {reader.address}")
    del reader.env["DMQ_ACCESS_KEY"], reader.env["DMQ_SECRET_KEY"]
    reader.typed = "...\n"


@after("docs/how-to/access-keys.md", "dmq context add")
def _(reader: Reader) -> None:
    assert re.search(r"on-call.*orders-eu", reader.said[-1]), reader.said[-1]


@before("docs/how-to/audit.md", "pip install")
def _(reader: Reader) -> None:
    """A daemon with a message."""
    reader.serve()
    reader.instead["0100163E0A0B0C..."] = reader.shell('dmq msg send orders "hello" --delay 1h').strip()


@before("docs/how-to/rocketmq-cluster.md", "dmq serve --broker")
def _(reader: Reader) -> None:
    """No proxy is there, which is what the daemon is for; each of the page's daemons is the only one."""
    if reader.daemon is not None:
        reader.stop()
    reader.instead |= {"10.0.0.1:8081": "127.0.0.1:1", "10.0.0.1:9876": "127.0.0.1:1"}


@before("docs/reference/http-api.md", "curl --json")
def _(reader: Reader) -> None:
    """A daemon with the HTTP API."""
    api = reader.instead["127.0.0.1:8083"] = f"127.0.0.1:{free_port()}"
    reader.serve("--http-api", api)
    reader.shell("dmq topic create orders --type delay")


class Producer:
    """A producer that is up, or not."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.is_up = True

    def send(self, *sent: object) -> str:
        """Send, or fail."""
        if not self.is_up:
            raise ConnectionError("no route")
        self.sent.append(sent)
        return "receipt"


@before("docs/how-to/producer-hook.md", "outcome = redelivery.send(")
def _(reader: Reader) -> None:
    reader.names |= {"producer": Producer()}


@after("docs/how-to/producer-hook.md", "outcome = redelivery.send(")
def _(reader: Reader) -> None:
    """A send while the broker is up, and one while it is away."""
    redelivery, producer = reader.names["redelivery"], reader.names["producer"]
    assert reader.names["outcome"] == Delivered(uid=reader.names["outcome"].uid)
    producer.is_up = False
    assert isinstance(redelivery.send("order-created", b"2"), Spooled)
    assert redelivery.close().still_waiting == 1
    producer.is_up = True
    reader.names["message"] = "hello"


@after("docs/how-to/producer-hook.md", "from dmq import durable")
def _(reader: Reader) -> None:
    """The producer's own receipt when it is up, ``Spooled`` when it is not."""
    durable = reader.names["producer"]
    assert durable.send("again") == "receipt"
    durable.redelivery.close()


@before("docs/how-to/producer-hook.md", "from dmq import SidecarClient")
def _(reader: Reader) -> None:
    reader.serve()


@after("docs/how-to/producer-hook.md", "from dmq import SidecarClient")
def _(reader: Reader) -> None:
    reader.names["redelivery"].close()


@before("docs/how-to/producer-hook.md", "from retry import RetryPolicy, Exponential")
def _(reader: Reader) -> None:
    from retry.testing import ManualClock, MemorySink

    reader.names["spool"] = MemorySink(ManualClock())


@after("docs/how-to/producer-hook.md", "from retry import RetryPolicy, Exponential")
def _(reader: Reader) -> None:
    reader.names["redelivery"].close()


@after("docs/how-to/producer-hook.md", "from retry import Redelivery, Spooled")
def _(reader: Reader) -> None:
    """What readers copy into their own tests."""
    reader.names["test_an_outage_loses_no_order"]()


@before("docs/how-to/operations.md", "dmq group ls   ")
def _(reader: Reader) -> None:
    """A message, and a group."""
    reader.instead["MESSAGE_ID"] = reader.shell('dmq msg send orders "hello" --delay 1h').strip()
    reader.shell("dmq group create billing")


@before("docs/how-to/operations.md", "dmq topic set orders --max-pending")
def _(reader: Reader) -> None:
    (reader.folder / "backup").mkdir()


@before("docs/how-to/operations.md", "/backup/dmq-stopped")
def _(reader: Reader) -> None:
    reader.stop()


@before("docs/how-to/replication.md", "dmq serve --replica")
def _(reader: Reader) -> None:
    """An object store in a folder; each of the page's daemons is the only one here."""
    if reader.daemon is not None:
        reader.stop()
    (reader.folder / "replica").mkdir(exist_ok=True)
    reader.instead["s3://bucket/orders"] = f"file://{reader.folder}/replica"


@before("docs/how-to/runbooks/replication.md", "dmq replica status")
def _(reader: Reader) -> None:
    """A daemon with a second copy in a folder."""
    (reader.folder / "replica").mkdir()
    url = reader.instead["s3://bucket/orders"] = f"file://{reader.folder}/replica"
    reader.serve("--replica", "sync", "--replica-url", url)


@before("docs/how-to/runbooks/consumers.md", "dmq dead groups")
def _(reader: Reader) -> None:
    reader.serve()


@before("docs/how-to/runbooks/disk-and-store.md", "dmq store check /var/lib/dmq\n")
def _(reader: Reader) -> None:
    """The store of a stopped daemon."""
    reader.serve("--data", reader.mine("/var/lib/dmq"))
    reader.stop()


@before("docs/how-to/runbooks/disk-and-store.md", "dmq spool check")
def _(reader: Reader) -> None:
    """A spool as well, of which one process died."""
    reader.env["DMQ_SPOOL"] = str(reader.folder / "spool")
    Spool(reader.folder / "spool").close()


@before("docs/how-to/runbooks/late-or-stopped.md", "dmq msg ls orders")
def _(reader: Reader) -> None:
    """A daemon with a message."""
    reader.serve()
    reader.shell('dmq msg send orders "hello"')


@before("docs/how-to/runbooks/refused-calls.md", "dmq quota ls")
def _(reader: Reader) -> None:
    reader.serve()


@before("docs/how-to/queue-clients.md", "import asyncio")
def _(reader: Reader) -> None:
    """The broker in the program's own process, which the page says is the same, and no waiting for ever."""
    reader.instead |= {
        "rocketmq-remoting://127.0.0.1:9876": "embedded:data",
        "await asyncio.Event().wait()": "await asyncio.sleep(0)",
    }


@before("examples/README.md", ".venv/bin/dmq serve")
def _(reader: Reader) -> None:
    """In a checkout."""
    (reader.folder / "examples").mkdir()
    for each in (ROOT / "examples").glob("*.py"):
        text = reader.mine(each.read_text(encoding="utf-8"))
        (reader.folder / "examples" / each.name).write_text(text, encoding="utf-8")


@after("examples/README.md", "examples/delayed.py")
def _(reader: Reader) -> None:
    """It comes, and not before its time."""
    found = re.fullmatch(r"sent     (\w+)\nreceived \1 two seconds later after ([\d.]+) s\n", reader.said[-1])
    assert found, reader.said[-1]
    assert float(found[2]) >= 2.0


# -- the blocks --------------------------------------------------------------------------------------------------------


def reason(block: Block) -> str:
    """Why a block is not run; empty if it is."""
    return next((why for first, why in NOT_RUN.get(block.page, {}).items() if block.first.startswith(first)), "")


def step(steps: dict[tuple[str, str], _Step], block: Block) -> _Step:
    """What is done before or after a block."""
    return next((each for (page, part), each in steps.items() if page == block.page and part in block.text), _nothing)


def _nothing(_: Reader) -> None:
    """Most blocks need nothing else."""


RUN = [page for page in pages() if any(not reason(each) for each in blocks(page))]


@pytest.mark.parametrize("page", RUN)
def test_each_block_runs_in_its_order(page: str, tmp_path: Path) -> None:
    """In one folder, with the daemon that the page starts, and with the output that it shows."""
    with Reader(tmp_path) as reader:
        for block in blocks(page):
            if not reason(block):
                step(BEFORE, block)(reader)
                reader.do(block, is_piece=page in PIECES)
                step(AFTER, block)(reader)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "dmq spool nonsense\n"),
        ("sh", "$ echo 019F109194EC8B7B510B167A78389AB77A is waiting\n019F109194EC8B7B510B167A78389AB77A is ready\n"),
        ("sh", "pip install 'rock-dmq[everything]'\n"),
        ("python", "import dmq.nonsense\n"),
        ("ruby", "puts 1\n"),
    ],
)
def test_a_block_that_is_wrong_is_noticed(language: str, text: str, tmp_path: Path) -> None:
    """A command that fails, other output, an extra that there is not, Python that fails, and what nobody can run."""
    with Reader(tmp_path) as reader, pytest.raises(AssertionError):
        reader.do(Block("README.md", 1, language, text), is_piece=False)


def test_exceptions_are_about_existing_blocks() -> None:
    """No reason and no preparation is left of a block that is gone; a test that is named is there."""
    there = {page: blocks(page) for page in pages()}
    named = [(page, first) for page, found in NOT_RUN.items() for first in found]
    for page, first in named:
        assert sum(each.first.startswith(first) for each in there[page]) == 1, (page, first)
    for page, part in [*BEFORE, *AFTER]:
        assert any(part in each.text and not reason(each) for each in there[page]), (page, part)
    for page, first in named:
        for folder, name in re.findall(r"(tests/[\w/]+)::(\w+)", NOT_RUN[page][first]):
            sources = (each.read_text(encoding="utf-8") for each in (ROOT / folder).rglob("test_*.py"))
            assert any(f"def {name}(" in each for each in sources), (page, first)


def listed() -> Iterator[Block]:
    """The blocks that are not run."""
    for page in pages():
        yield from (each for each in blocks(page) if reason(each))


def test_a_block_that_is_not_run_can_be_parsed() -> None:
    """By the shell, or whatever its language is."""
    for block in listed():
        match block.language:
            case "sh" if not block.has_output and block.page != "docs/reference/commands.md":
                subprocess.run(["sh", "-n", "-c", block.text], check=True, timeout=10)
            case "python":
                compile(block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "toml":  # it is what the tests of such keys give one
                key = tomllib.loads(ACL)["keys"][HOOK.access_key]
                assert tomllib.loads(block.text) == {name: each for name, each in key.items() if name != "secret"}
            case "json":  # the body of a message that the daemon takes from a cluster
                sent = Message(topic=INNER_TOPIC, message_id="01" * 17, body=block.text.encode())
                assert unwrap(encode(sent).payload).topic == "orders"


def test_commands_that_are_not_run_have_their_options() -> None:
    """Of ``dmq``, the targets of ``make``, and files of this repository."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in listed():
        if (block.language != "sh" and not block.has_output) or block.page == "docs/reference/commands.md":
            continue
        for each in commands(block):
            assert set(re.findall(r"\bmake ([\w-]+)", each.text.partition("#")[0])) <= targets, each.text
            assert [path for path in re.findall(r"\bdeploy/[\w./-]+", each.text) if not (ROOT / path).exists()] == []
            for words in arguments(each.text):
                done = run_command(*words, "--help")
                assert done.returncode == 0, (each.text, done.stderr)


@at_length
def test_the_example_in_java(tmp_path: Path) -> None:
    """It gets what it sent, whatever came before it."""
    require(JAVA)
    (block,) = (each for each in blocks("docs/reference/clients.md") if each.language == "java")
    with Reader(tmp_path) as reader:
        reader.serve()
        reader.shell('dmq msg send orders "hello"')
        (tmp_path / "Later.java").write_text(reader.mine(block.text), encoding="utf-8")
        options = [*SHORT_LIVED, f"-Duser.home={tmp_path}", "-cp", f"{CLIENTS}/java/.cache/lib/*"]
        said = reader.shell(shlex.join(["java", *options, "Later.java"]))
        assert re.fullmatch(r"([0-9A-F]{34} Optional\S+\n){2}", said), said


@at_length
@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker here")
def test_docker_has_the_options_that_it_is_given() -> None:
    """Its command is asked, which needs no daemon of Docker."""
    lines = [each.text.split() for block in listed() for each in commands(block) if each.text.startswith("docker ")]
    for words in lines:
        said = subprocess.run([*words[:2], "--help"], check=True, capture_output=True, text=True, timeout=60).stdout
        options = {each for each in words[2 : words.index("dmq", 4) if "dmq" in words[4:] else None] if each[0] == "-"}
        assert [each for each in options if f" {each} " not in said and f" {each}," not in said] == []
    assert len(lines) == 3
