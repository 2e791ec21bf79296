"""Apache RocketMQ: a name server, and brokers with a proxy each, as processes of whoever starts them.

The bench has it as a peer, the tests as the cluster behind the daemon. Maven brings it into ``build/bench``, once. It
takes a minute to warm up and is never idle, so the bench starts it once and stops it by signal (SIGSTOP) while others
are measured.

RocketMQ lets only two of its servers be bound to the loopback and opens three ports of each broker on every interface.
A library that is loaded before it has those bound to the loopback as well; it takes a C compiler. Where there is none,
and that matters, run the whole in a network of its own, once the artifacts are there:

    unshare -rn sh -c 'ip link set lo up && make bench ARGS="--peer"'
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from bench.load import Load, LoadFailed
from bench.place import BUILD, directory
from bench.remoting import administer
from broker_adapter.contracts.errors import BrokerError
from broker_adapter.remoting import RemotingAdmin
from broker_adapter.runtime.clock import SystemClock

VERSION = "5.5.0"
VERSION_4 = "4.9.7"  # of the line before: brokers without proxies, for clients of the classic protocol alone
NAME = f"RocketMQ {VERSION}, sync flush"
TOPICS: Mapping[str, str] = {"normal": "bench-normal", "delayed": "bench-delayed"}
_TYPES = {"normal": "NORMAL", "delayed": "DELAY"}
_MODULES = ("namesrv", "broker")  # and "proxy" where there is one
_PREFIX = "org.apache.rocketmq"
_PRELOAD = "loopback.so"
_MAVEN_S_MAX, _READY_S_MAX = 600, 120
_G1_FROM_MB = 1024
_QUEUES = 4  # of a topic at each broker
_NO_TLS = "-Dtls.server.mode=disabled"  # a certificate made at each start is half of what a name server's takes
WARM_UP_S, _RESUME_S = 60.0, 2
_BLOCK = 4
_BLOCKS = range(12_000, 20_000, _BLOCK)
_OPENS = (
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    *(
        f"--add-opens=java.base/{name}=ALL-UNNAMED"
        for name in ("java.nio", "jdk.internal.ref", "java.util", "java.lang")
    ),
)
# One line for each key. What is not said is as RocketMQ has it.
_BROKER = """\
brokerClusterName=DefaultCluster
brokerName={name}
brokerId=0
brokerRole=ASYNC_MASTER
flushDiskType=SYNC_FLUSH
bindAddress=127.0.0.1
brokerIP1=127.0.0.1
brokerIP2=127.0.0.1
listenPort={listen}
haListenPort={replica}
namesrvAddr={names}
storePathRootDir={data}/store
storePathCommitLog={data}/store/commitlog
mappedFileSizeCommitLog=268435456
messageIndexEnable=false
transactionCheckInterval=5000
enablePropertyFilter=true
enableMixedMessageType=true
mappedFileSizeConsumeQueue=600000
mappedFileSizeTimerLog=10400000
recallMessageEnable=true
diskMaxUsedSpaceRatio=95
diskSpaceWarningLevelRatio=99
"""
# RocketMQ 4 does not start without a file of these for each of its servers.
_LOGGING = """\
<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %p %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""
# In front of ``bind``: whoever asks for every interface gets the loopback.
_LOOPBACK_ONLY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

int bind(int fd, const struct sockaddr *address, socklen_t length)
{
    int (*real)(int, const struct sockaddr *, socklen_t) =
        (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
    struct sockaddr_in four;
    struct sockaddr_in6 six;
    if (length >= sizeof four && address->sa_family == AF_INET) {
        memcpy(&four, address, sizeof four);
        if (four.sin_addr.s_addr != htonl(INADDR_ANY)) return real(fd, address, length);
        four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return real(fd, (struct sockaddr *)&four, sizeof four);
    }
    if (length >= sizeof six && address->sa_family == AF_INET6) {
        memcpy(&six, address, sizeof six);
        if (!IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr)) return real(fd, address, length);
        static const unsigned char loopback[16] = {[10] = 255, [11] = 255, [12] = 127, [15] = 1};
        memcpy(&six.sin6_addr, loopback, sizeof loopback); /* that of IPv4, which is what everybody dials */
        return real(fd, (struct sockaddr *)&six, sizeof six);
    }
    return real(fd, address, length);
}
"""


class PeerMissing(Exception):
    """RocketMQ cannot be had or does not start here."""


class Node:
    """A broker with its proxy, in one process; of RocketMQ 4 the broker alone."""

    def __init__(self, name: str, data: Path) -> None:
        self.name, self.data = name, data
        self.listen, self.grpc, self.remoting = _free_ports(3)
        self.address = f"127.0.0.1:{self.grpc}"
        self.broker = f"127.0.0.1:{self.listen}"
        self.process: subprocess.Popen[bytes] | None = None


class RocketMQ:
    """A running RocketMQ. What is killed keeps its data and its ports, and can be started again."""

    def __init__(
        self,
        data: Path,
        lib: Path,
        *,
        brokers: Sequence[str] = ("broker-a",),
        heap_mb: int = 1024,
        proxy: Mapping[str, object] = MappingProxyType({}),
        version: str = VERSION,
        broker: str = "",
        conf: Mapping[str, str] = MappingProxyType({}),
        jvm: Sequence[str] = (),
        topics: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it, with these brokers and settings of them and their proxies, and wait until it serves.

        Raises PeerMissing.

        ``lib`` has the artifacts of ``version``; ``broker`` is lines that go behind those of broker.conf,
        ``conf`` more files of its home's folder ``conf``, by their names; ``jvm`` is options of Java for all of it.
        ``topics``, by name and type, are there from the start: one by one they cost a tenth of a second each.
        """
        self._data, self._lib, self._heap_mb, self._proxy, self._broker = data, lib, heap_mb, proxy, broker
        self._has_proxies, self._jvm = _has_proxies(version), jvm
        (names,) = _free_ports(1)
        self._names = f"127.0.0.1:{names}"
        self.nodes = [Node(name, data / name) for name in brokers]
        self._name_server: subprocess.Popen[bytes] | None = None
        (data / "home" / "conf").mkdir(parents=True)
        for name, text in {**{f"logback_{server}.xml": _LOGGING for server in _MODULES}, **conf}.items():
            (data / "home" / "conf" / name).write_text(text, encoding="ascii")
        (data / "namesrv.conf").write_text(
            f"listenPort={names}\nbindAddress=127.0.0.1\nkvConfigPath={data}/kvConfig.json\n", encoding="ascii"
        )
        try:
            self._name_server = self._spawn(
                ["-Xms64m", "-Xmx128m", "-XX:+UseSerialGC", _NO_TLS],
                ["namesrv.NamesrvStartup", "-c", str(data / "namesrv.conf")],
                data,
            )
            self._serves(self._name_server, names, "the name server")
            for node in self.nodes:
                self._configure(node, topics)
                self._launch(node)
            for node in self.nodes:
                self._until_it_serves(node)
            self.make_topics({}, routed=topics)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> str:
        """The address of the name server."""
        return self._names

    @property
    def address(self) -> str:
        """The address of the first proxy."""
        return self.nodes[0].address

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses of all proxies."""
        return tuple(node.address for node in self.nodes)

    def start(self, node: Node) -> None:
        """Start a broker with its proxy, and wait until both serve and it is known. Raises PeerMissing.

        It ends with the thread that started it, by SIGKILL: what is killed must leave no cluster behind.
        """
        self._launch(node)
        self._until_it_serves(node)
        self._until_it_is_known(node)

    def kill(self, node: Node) -> None:
        """End a broker and its proxy by SIGKILL."""
        if node.process is not None:
            node.process.kill()
            node.process.wait()

    def make_topics(self, topics: Mapping[str, str], *, routed: Collection[str] = ()) -> None:
        """Make topics, by name and type, at all brokers. Raises PeerMissing if the name server never hears of them.

        It has to hear of those in ``routed`` as well, which are there already.
        """
        clock = SystemClock()
        until_s = clock.monotonic_s() + _READY_S_MAX
        missing, wanted = {*topics, *routed}, [node.name for node in self.nodes]

        async def make(admin: RemotingAdmin) -> None:
            for topic in missing & topics.keys():
                await admin.make_topic(topic, queues=_QUEUES, kind=topics[topic], brokers=wanted)
            for topic in list(missing):
                if [part.broker for part in await admin.route(topic)] != wanted:
                    return
                missing.remove(topic)

        while missing:
            if clock.monotonic_s() > until_s:
                raise PeerMissing(f"topics are not routed: {', '.join(missing)}")
            with suppress(BrokerError):  # a broker that serves is not known to the name server at once
                administer(self._names, make)
            time.sleep(0.2)
        if self._has_proxies and (topics or routed):
            time.sleep(2)  # a proxy must not be asked before: it remembers that there is no such topic

    def make_group(self, group: str, *, attempts: int = 17, is_fifo: bool = False) -> None:
        """Make a consumer group at all brokers. ``attempts`` counts deliveries, the first included."""
        names = [node.name for node in self.nodes]
        administer(
            self._names,
            lambda admin: admin.make_group(group, retries_max=attempts - 1, is_fifo=is_fifo, brokers=names),
        )

    def warm_up(self, load: Load, seconds: float) -> None:
        """Send until the virtual machine has compiled what it will; then stop it."""
        for topic in TOPICS.values():
            delays = {"delay_min": 3_600_000, "delay_max": 7_200_000} if topic == TOPICS["delayed"] else {}
            load.run("send", address=self.address, topic=topic, in_flight=64, seconds=seconds / 2, **delays)
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Let it run for a while."""
        self._signal(signal.SIGCONT)
        time.sleep(_RESUME_S)
        try:
            yield self.address
        finally:
            self._signal(signal.SIGSTOP)

    @contextmanager
    def asleep(self, *nodes: Node) -> Iterator[None]:
        """Stop it, or some of its brokers, for a while; it runs on afterwards.

        What is stopped takes connections and answers nothing.
        """
        with ExitStack() as all_of_it:
            for process in [node.process for node in nodes if node.process is not None] or self.processes:
                all_of_it.enter_context(stopped(process))
            yield
        time.sleep(_RESUME_S)

    @contextmanager
    def one_more(self, name: str) -> Iterator[Node]:
        """Have one more broker for a while. Raises PeerMissing."""
        node = Node(name, self._data / name)
        self._configure(node, {})
        self.nodes.append(node)
        try:
            self.start(node)
            yield node
        finally:
            self.kill(node)
            self.nodes.remove(node)

    def close(self) -> None:
        """End its processes. What it kept is of no use to anybody then, so nothing is written any more."""
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The name server, and the brokers with their proxies."""
        return [each for each in (self._name_server, *(node.process for node in self.nodes)) if each is not None]

    def _launch(self, node: Node) -> None:
        proxied = ("-pm", "local", "-pc", str(node.data / "proxy.json"), "-bc")
        main, *options = ("proxy.ProxyStartup", *proxied) if self._has_proxies else ("broker.BrokerStartup", "-c")
        collector = "-XX:+UseG1GC" if self._heap_mb >= _G1_FROM_MB else "-XX:+UseSerialGC"
        memory = [f"-Xms{self._heap_mb}m", f"-Xmx{self._heap_mb}m", f"-XX:MaxDirectMemorySize={self._heap_mb}m"]
        node.process = self._spawn(
            [*memory, collector, *(() if self._has_proxies else (_NO_TLS,))],  # the proxies' TLS is this one too
            [main, "-n", self._names, *options, str(node.data / "broker.conf")],
            node.data,
        )

    def _until_it_serves(self, node: Node) -> None:
        assert node.process is not None
        self._serves(node.process, node.grpc if self._has_proxies else node.listen, node.name)

    def _until_it_is_known(self, node: Node) -> None:
        """A broker tells the name server of itself some time after it serves."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + _READY_S_MAX
        while clock.monotonic_s() < until_s:
            with suppress(BrokerError):
                if node.name in administer(self._names, RemotingAdmin.cluster).addresses:
                    return
            time.sleep(0.1)
        raise PeerMissing(f"the name server does not know {node.name}")

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    @property
    def _environment(self) -> dict[str, str]:
        home, preload = str(self._data / "home"), self._lib.parent / _PRELOAD
        found = {**os.environ, "ROCKETMQ_HOME": home, "RMQ_PROXY_HOME": home, "NAMESRV_ADDR": self._names}
        return {**found, "LD_PRELOAD": str(preload)} if preload.exists() else found

    def _command(self, options: list[str], arguments: list[str], folder: Path) -> list[str]:
        home = f"-Duser.home={folder}", f"-Drocketmq.home.dir={self._data / 'home'}"
        main, *others = arguments
        # A bench that is killed must not leave it behind, stopped.
        bound = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        return [
            *bound,
            "java",
            *self._jvm,
            *options,
            *_OPENS,
            *home,
            "-cp",
            f"{self._lib}/*",
            f"{_PREFIX}.{main}",
            *others,
        ]

    def _spawn(self, options: list[str], arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        with (folder / "out.log").open("ab") as log:
            return subprocess.Popen(
                self._command(options, arguments, folder), stdout=log, stderr=log, env=self._environment, cwd=folder
            )

    def _serves(self, process: subprocess.Popen[bytes], port: int, what: str) -> None:
        """Return once a port of a process takes connections."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + _READY_S_MAX
        while clock.monotonic_s() < until_s and process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise PeerMissing(f"{what} does not serve: {self._last_words()}")

    def _configure(self, node: Node, topics: Mapping[str, str]) -> None:
        config = node.data / "store" / "config"
        config.mkdir(parents=True, exist_ok=True)
        if topics:
            known = {name: _settings(name, kind) for name, kind in topics.items()}
            kept = {"dataVersion": {"counter": 1, "stateVersion": 0, "timestamp": 0}, "topicConfigTable": known}
            (config / "topics.json").write_text(json.dumps(kept), encoding="utf-8")
        (node.data / "broker.conf").write_text(
            _BROKER.format(
                name=node.name, data=node.data, names=self._names, listen=node.listen, replica=node.listen + 1
            )
            + self._broker,
            encoding="ascii",
        )
        proxy = {"rocketMQClusterName": "DefaultCluster", "proxyMode": "LOCAL", "namesrvAddr": self._names}
        ports = {"grpcServerPort": node.grpc, "remotingListenPort": node.remoting}
        (node.data / "proxy.json").write_text(json.dumps({**proxy, **ports, **self._proxy}), encoding="ascii")

    def _last_words(self) -> str:
        logs = sorted(self._data.rglob("out.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(encoding="utf-8", errors="replace")[-300:].strip() if logs else ""


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop a process for a while. On a busy machine its threads run on for a moment: that is waited for."""
    process.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def running(load: Load, *, warm_up_s: float = WARM_UP_S) -> Iterator[RocketMQ]:
    """Run a RocketMQ for the length of a bench, stopped but for ``awake``. Raises PeerMissing."""
    lib = artifacts()
    with ExitStack() as last:
        peer = RocketMQ(last.enter_context(directory()), lib)
        last.callback(peer.close)
        peer.make_topics({topic: _TYPES[kind] for kind, topic in TOPICS.items()})
        try:
            peer.warm_up(load, warm_up_s)
        except LoadFailed as error:
            raise PeerMissing(f"it takes no messages: {error}") from error
        yield peer


def artifacts(version: str = VERSION) -> Path:
    """Return the folder of its jars; Maven brings them if they are not there. Raises PeerMissing."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise PeerMissing(f"{tool} is not here")
    place = BUILD / f"rocketmq-{version}"
    done = place / "complete"
    if not done.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "pom.xml").write_text(_pom(version), encoding="utf-8")
        brought = subprocess.run(
            ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib", "-DincludeScope=runtime"],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=_MAVEN_S_MAX,
            check=False,
        )
        if brought.returncode:
            raise PeerMissing(f"Maven does not bring it: {(brought.stdout + brought.stderr).strip()[-300:]}")
        done.touch()
    _compile_preload(place)
    return place / "lib"


def _compile_preload(place: Path) -> None:
    """Have the library that keeps it to the loopback, where there is a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or (place / _PRELOAD).exists():
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        source, library = Path(folder) / "loopback.c", Path(folder) / _PRELOAD
        source.write_text(_LOOPBACK_ONLY, encoding="ascii")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
        library.replace(place / _PRELOAD)  # whole, or not there: others may be doing the same


def _settings(topic: str, kind: str) -> Mapping[str, object]:
    """What a broker keeps of a topic."""
    return {
        "topicName": topic,
        "attributes": {"message.type": kind},
        "order": kind == "FIFO",
        "perm": 6,  # to read and to write
        "readQueueNums": _QUEUES,
        "writeQueueNums": _QUEUES,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
    }


def _has_proxies(version: str) -> bool:
    return not version.startswith("4.")


def _pom(version: str) -> str:
    modules = "".join(
        f"<dependency><groupId>{_PREFIX}</groupId><artifactId>rocketmq-{name}</artifactId>"
        f"<version>{version}</version></dependency>"
        for name in (*_MODULES, *(["proxy"] if _has_proxies(version) else []))
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>bench</groupId><artifactId>peer</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{modules}</dependencies></project>\n"
    )


def _free_ports(count: int) -> tuple[int, ...]:
    """Return ports that nobody has, with room around each: a broker takes the one above and the one two below as well.

    They lie below those that the system hands out by itself, to connections too, and beside those of daemons.
    """
    found: list[int] = []
    for first in random.sample(_BLOCKS, len(_BLOCKS)):
        with ExitStack() as held:
            try:
                for port in range(first, first + _BLOCK):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(first + 2)
        if len(found) == count:
            return tuple(found)
    raise PeerMissing(f"no free ports between {_BLOCKS[0]} and {_BLOCKS[-1]}")
