"""The peer: Apache RocketMQ, a name server and a proxy with its broker, as processes of this bench.

Maven brings it into ``build/bench``, once. It takes a minute to warm up and is never idle, so it is started once and
stopped by signal (SIGSTOP) while others are measured.

RocketMQ lets only two of its servers be bound to the loopback; three ports are open on every interface meanwhile. Where
that matters, run the bench in a network of its own, once the artifacts are there:

    unshare -rn sh -c 'ip link set lo up && make bench ARGS="--peer"'
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.load import Load, LoadFailed
from bench.place import BUILD, directory
from broker_adapter.clock import SystemClock

VERSION = "5.5.0"
NAME = f"RocketMQ {VERSION}, sync flush"
TOPICS: Mapping[str, str] = {"normal": "bench-normal", "delayed": "bench-delayed"}
_TYPES = {"normal": "NORMAL", "delayed": "DELAY"}
_MODULES = ("namesrv", "broker", "proxy", "tools")
_PREFIX = "org.apache.rocketmq"
_MAVEN_S_MAX, _READY_S_MAX, _TOOL_S_MAX, _STOP_S_MAX = 600, 120, 60, 15
WARM_UP_S, _RESUME_S = 60.0, 2
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
brokerName=broker-a
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
diskMaxUsedSpaceRatio=95
diskSpaceWarningLevelRatio=99
"""


class PeerMissing(Exception):
    """RocketMQ cannot be had or does not start here."""


class RocketMQ:
    """A running RocketMQ. ``awake`` gives its address for as long as it may run."""

    def __init__(self, data: Path, lib: Path) -> None:
        """Start it and wait until its topics are routed. Raises PeerMissing."""
        self._data, self._lib = data, lib
        self._processes: list[subprocess.Popen[bytes]] = []
        names, broker, grpc, remoting = _free_ports()
        self.address = f"127.0.0.1:{grpc}"
        self._names, self._broker = f"127.0.0.1:{names}", f"127.0.0.1:{broker}"
        self._configure(names, broker, grpc, remoting)
        try:
            self._start(
                ["-Xms64m", "-Xmx128m", "-XX:+UseSerialGC"],
                ["namesrv.NamesrvStartup", "-c", str(data / "namesrv.conf")],
                names,
            )
            self._start(
                ["-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g", "-XX:+UseG1GC"],
                [
                    *("proxy.ProxyStartup", "-n", self._names, "-pm", "local"),
                    *("-pc", str(data / "proxy.json"), "-bc", str(data / "broker.conf")),
                ],
                grpc,
            )
            for kind, topic in TOPICS.items():
                self._make_topic(topic, _TYPES[kind])
            time.sleep(2)  # the proxy must not be asked before: it remembers that there is no such topic
        except BaseException:
            self.close()
            raise

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

    def close(self) -> None:
        """End its processes, the last one first."""
        self._signal(signal.SIGCONT)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(_STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    @property
    def _environment(self) -> dict[str, str]:
        home = str(self._data / "home")
        return {**os.environ, "ROCKETMQ_HOME": home, "RMQ_PROXY_HOME": home, "NAMESRV_ADDR": self._names}

    def _command(self, options: list[str], arguments: list[str]) -> list[str]:
        home = f"-Duser.home={self._data}", f"-Drocketmq.home.dir={self._data / 'home'}"
        main, *others = arguments
        # A bench that is killed must not leave it behind, stopped.
        bound = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        return [*bound, "java", *options, *_OPENS, *home, "-cp", f"{self._lib}/*", f"{_PREFIX}.{main}", *others]

    def _start(self, options: list[str], arguments: list[str], port: int) -> None:
        with (self._data / "out.log").open("ab") as log:
            process = subprocess.Popen(
                self._command(options, arguments), stdout=log, stderr=log, env=self._environment, cwd=self._data
            )
        self._processes.append(process)
        clock = SystemClock()
        until_s = clock.monotonic_s() + _READY_S_MAX
        while clock.monotonic_s() < until_s:
            if process.poll() is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise PeerMissing(f"{arguments[0]} does not serve: {self._last_words()}")

    def _make_topic(self, topic: str, kind: str) -> None:
        where = ["-b", self._broker, "-t", topic, "-r", "4", "-w", "4", "-a", f"+message.type={kind}"]
        clock = SystemClock()
        until_s = clock.monotonic_s() + _READY_S_MAX
        said = ""
        while clock.monotonic_s() < until_s:
            self._tool("updateTopic", *where)
            said = self._tool("topicRoute", "-t", topic)
            if '"queueDatas"' in said:
                return
            time.sleep(0.5)
        raise PeerMissing(f"topic {topic} is not routed: {said[-300:]}")

    def _tool(self, *arguments: str) -> str:
        done = subprocess.run(
            self._command(["-Xmx128m"], ["tools.command.MQAdminStartup", *arguments]),
            capture_output=True,
            text=True,
            env=self._environment,
            cwd=self._data,
            timeout=_TOOL_S_MAX,
            check=False,
        )
        return done.stdout + done.stderr

    def _configure(self, names: int, broker: int, grpc: int, remoting: int) -> None:
        data = self._data
        (data / "home").mkdir()
        (data / "namesrv.conf").write_text(
            f"listenPort={names}\nbindAddress=127.0.0.1\nkvConfigPath={data}/kvConfig.json\n", encoding="ascii"
        )
        (data / "broker.conf").write_text(
            _BROKER.format(data=data, names=self._names, listen=broker, replica=broker + 1), encoding="ascii"
        )
        proxy = {"rocketMQClusterName": "DefaultCluster", "proxyMode": "LOCAL", "namesrvAddr": self._names}
        ports = {"grpcServerPort": grpc, "remotingListenPort": remoting}
        (data / "proxy.json").write_text(json.dumps({**proxy, **ports}), encoding="ascii")

    def _last_words(self) -> str:
        return (self._data / "out.log").read_text(encoding="utf-8", errors="replace")[-300:].strip()


@contextmanager
def running(load: Load, *, warm_up_s: float = WARM_UP_S) -> Iterator[RocketMQ]:
    """Run a RocketMQ for the length of a bench, stopped but for ``awake``. Raises PeerMissing."""
    lib = _artifacts()
    with ExitStack() as last:
        peer = RocketMQ(last.enter_context(directory()), lib)
        last.callback(peer.close)
        try:
            peer.warm_up(load, warm_up_s)
        except LoadFailed as error:
            raise PeerMissing(f"it takes no messages: {error}") from error
        yield peer


def _artifacts() -> Path:
    """Return the folder of its jars; Maven brings them if they are not there."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise PeerMissing(f"{tool} is not here")
    place = BUILD / f"rocketmq-{VERSION}"
    done = place / "complete"
    if not done.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "pom.xml").write_text(_pom(), encoding="utf-8")
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
    return place / "lib"


def _pom() -> str:
    modules = "".join(
        f"<dependency><groupId>{_PREFIX}</groupId><artifactId>rocketmq-{name}</artifactId>"
        f"<version>{VERSION}</version></dependency>"
        for name in _MODULES
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>bench</groupId><artifactId>peer</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{modules}</dependencies></project>\n"
    )


def _free_ports() -> tuple[int, int, int, int]:
    """Return ports that nobody has; the broker takes the one above and the one two below its own as well."""
    with ExitStack() as held:
        found = []
        for _ in range(4):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
    return found[0], found[1], found[2], found[3]
