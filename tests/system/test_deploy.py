"""What is installed with is what its readers take, fits the daemon and gives it no rights that it does not need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.rigs.daemon.process import Daemon

from dmq.config.settings import DaemonConfig, load

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "dmq.service"
SAMPLE = DEPLOY / "dmq.toml"
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = DEPLOY / "compose.yaml"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# The oldest in which containers beside an application are what they are there, and the newest with a schema.
KUBERNETES = ("1.29", kubernetes_validate.latest_version())
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
def test_the_unit_is_hardened() -> None:
    """An exposure of 2.0 at most, by systemd's own count."""
    found = analyze("security", "--offline=true", "--threshold=20", str(UNIT))
    assert found.returncode == 0, found.stdout[-500:] + found.stderr


@needs_systemd
def test_the_unit_is_one(tmp_path: Path) -> None:
    """Systemd reads it without a complaint; what it starts is not installed here."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(encoding="utf-8")))
    found = analyze("verify", "--man=no", str(copy))
    assert (found.returncode, [line for line in found.stderr.splitlines() if UNIT.name in line]) == (0, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run the daemon as another user")
def test_the_unit_hands_the_files_of_root_to_another_user() -> None:
    """Files of root in /etc are out of reach of the service; the command of the unit starts with the copies."""
    unit = UNIT.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o711)
        etc, credentials, data = (Path(base) / name for name in ("etc", "credentials", "data"))
        for path in (etc, credentials, data):
            path.mkdir(mode=0o700)
        (etc / "dmq.toml").write_text("metrics_listen = 'off'\ntrail = 'off'\n", encoding="utf-8")
        (etc / "acl.toml").write_text('[keys.shop]\nsecret = "s"\nadmin = true\n', encoding="utf-8")
        # As systemd does: a copy for the user of the service, by the lines of the unit.
        loaded = re.findall(r"(?m)^#?LoadCredential=(\S+):/etc/dmq/(\S+)$", unit)
        assert loaded == [("dmq.toml", "dmq.toml"), ("acl.toml", "acl.toml")]
        for name, source in loaded:
            shutil.copy(etc / source, credentials / name)
        (variable,) = re.findall(r"(?m)^#?Environment=(\S+)=%d/acl.toml$", unit)
        (command,) = re.findall(r"(?m)^ExecStart=/opt/dmq/bin/dmq serve (.+)$", unit)
        assert "/etc/" not in command
        arguments = command.replace("%d", str(credentials)).replace("/var/lib/dmq", str(data)).split()
        for path in (credentials, *credentials.iterdir(), data):
            os.chown(path, _NOBODY, _NOBODY)
            path.chmod(0o700 if path.is_dir() else 0o400)
        env = {**os.environ, variable: str(credentials / "acl.toml")}
        check = ["config", "check", "--listen", "127.0.0.1:0"]
        refused = as_nobody([*check, "--config", str(etc / "dmq.toml")], env)
        assert (refused.returncode, "Permission denied" in refused.stderr) == (2, True), refused
        checked = as_nobody([*check, *arguments], env)
        assert (checked.returncode, checked.stdout) == (0, "a daemon can start with these settings\n"), checked


_NOBODY = 65534
# The interpreter may be out of reach of another user: everything is imported before the user changes.
_AS_NOBODY = f"""
import contextlib, io, os, sys
from dmq.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(sys.argv[1:])
os.setgroups([]); os.setgid({_NOBODY}); os.setuid({_NOBODY}); os.chdir("/")
sys.exit(main(sys.argv[1:]))
"""


def as_nobody(arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a ``dmq`` command as a user that owns nothing."""
    return subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(env),
    )


def test_the_sample_file_starts_a_daemon(tmp_path: Path) -> None:
    """As it is, in a directory of its own. Its active lines are the defaults, and its examples are valid."""
    text, console = SAMPLE.read_text(encoding="utf-8"), 'console = "off"\n'
    assert load(config_file=SAMPLE) == load({"console": "off"})
    with Daemon(tmp_path / "data", "--config", str(SAMPLE)) as daemon:
        daemon.stop()
    whole = re.sub(r"(?m)^#(?=\w+ = )", "", text.replace(console, ""))
    for excluded in ("replica|replica_url", "broker|endpoints"):  # one of the two at a time
        written = re.sub(rf"(?m)^(?:{excluded}) = .*$", "", whole)
        assert len(tomllib.loads(written)) > 30
        (tmp_path / "dmq.toml").write_text(written, encoding="utf-8")
        load(config_file=tmp_path / "dmq.toml")


def objects(path: Path) -> list[dict[str, Any]]:
    """What a manifest holds."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(kind: str) -> list[dict[str, Any]]:
    """What all manifests hold of that kind."""
    return [each for path in MANIFESTS for each in objects(path) if each["kind"] == kind]


def pods(*paths: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pods of these manifests, or of all, each with the container of the daemon."""
    found = []
    for each in (one for path in paths or MANIFESTS for one in objects(path) if one["kind"] == "StatefulSet"):
        pod = each["spec"]["template"]["spec"]
        (daemon,) = (one for one in [*pod.get("initContainers", ()), *pod["containers"]] if one["name"] == "dmq")
        found.append((pod, daemon))
    return found


def image_variables() -> dict[str, str]:
    """The environment that the image gives the daemon."""
    _, _, env = DOCKERFILE.read_text(encoding="utf-8").partition("\nENV ")
    return dict(re.findall(r"(DMQ_[A-Z_]+)=(\S+)", env))


def test_a_stop_is_given_the_time_it_takes() -> None:
    """Whoever stops the daemon waits for longer than its own grace."""
    needed_s = DaemonConfig().shutdown_grace_s + 10
    (seconds,) = re.findall(r"(?m)^TimeoutStopSec=(\d+)$", UNIT.read_text(encoding="utf-8"))
    assert int(seconds) > needed_s
    service = objects(COMPOSE)[0]["services"]["dmq"]
    assert int(service["stop_grace_period"].removesuffix("s")) > needed_s
    assert all(pod["terminationGracePeriodSeconds"] > needed_s for pod, _ in pods())


def test_every_setting_is_one() -> None:
    """No variable of the environment is misspelt: the daemon would refuse it at its start."""
    known = {f"DMQ_{key.upper()}" for key in DaemonConfig.model_fields} | {"DMQ_CONFIG", "DMQ_COMPILED"}
    for path in sorted(each for each in DEPLOY.rglob("*") if each.is_file()):
        named = set(re.findall(r"\bDMQ_[A-Z_]+", path.read_text(encoding="utf-8")))
        assert named <= known, path.name


def test_the_image_runs_as_an_unnamed_user() -> None:
    """A fixed user without rights, the exec form so that signals arrive, packages by their hashes."""
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    for word in ("ENTRYPOINT ", "CMD "):
        assert all(line.removeprefix(word).startswith("[") for line in lines if line.startswith(word))
    installs = [line for line in lines if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)
    assert not any(line.startswith("ADD ") or ":latest" in line for line in lines)


def test_the_image_is_described_without_a_complaint() -> None:
    """Hadolint knows the instructions, and what shells make of them."""
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("no hadolint for this machine")
    found = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_compose_file_is_one() -> None:
    """It is what the specification of Compose allows, by the schema that comes with a library."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="alone"),
        pytest.param({"DMQ_BROKER": "rocketmq", "DMQ_ENDPOINTS": "a:1;b:2"}, id="cluster"),
        pytest.param(
            {
                "DMQ_BROKER": "rocketmq",
                "DMQ_ENDPOINTS": "a:1",
                "DMQ_CLUSTER_ACCESS_KEY": "key",
                "DMQ_CLUSTER_SECRET_KEY": "secret",
                "DMQ_CLUSTER_TLS": "true",
                "DMQ_INNER_TOPIC": "dmq_inner_topic",
            },
            id="cluster with all",
        ),
    ],
)
def test_the_compose_file_configures_a_daemon(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it may be given and what it says otherwise, in the environment of the image."""
    variables = objects(COMPOSE)[0]["services"]["dmq"]["environment"]
    for name, written in {**image_variables(), **variables}.items():
        default = re.fullmatch(r"\$\{" + name + r":-(.*)\}", written)
        monkeypatch.setenv(name, given.get(name, str(default[1])) if default else written)
    config = load()
    assert config.broker == given.get("DMQ_BROKER", "embedded")
    assert config.listen.host == "0.0.0.0"


def test_the_compose_file_gives_no_rights() -> None:
    """Its ports are this machine's alone, and it may write nothing but the volume that the store lies in."""
    service = objects(COMPOSE)[0]["services"]["dmq"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["volumes"] == ["data:/var/lib/dmq"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_takes_it(path: Path, version: str) -> None:
    """By the strict schemas of that version, which refuse fields that there are not."""
    for each in objects(path):
        kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_there_is_not_is_refused() -> None:
    """The schemas are there, and used."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "dmq"}, "spec": {"selectr": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, KUBERNETES[-1], strict=True)


def test_the_pods_configure_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the ConfigMap, as it is and with all its lines; variables; and the paths they name are mounted."""
    for path in MANIFESTS:
        maps = [each["data"]["dmq.toml"] for each in objects(path) if each["kind"] == "ConfigMap"]
        texts = [*maps, *(re.sub(r"(?m)^ *# (?=\w+ = )", "", each) for each in maps)]
        assert not maps or set(tomllib.loads(texts[1])) > set(tomllib.loads(texts[0]))
        for _, container in pods(path):
            mounts = [Path(each["mountPath"]) for each in container["volumeMounts"]]
            assert not [each for each in mounts if set(each.parents) & set(mounts)]  # one in another cannot be made
            variables = {each["name"]: each["value"] for each in container["env"]}
            assert ("DMQ_CONFIG" in variables) == bool(maps)
            with monkeypatch.context() as environment:
                for name, value in {**image_variables(), **variables}.items():
                    environment.setenv(name, value)
                for text in texts or ("",):
                    (tmp_path / "dmq.toml").write_text(text, encoding="utf-8")
                    environment.setenv("DMQ_CONFIG", str(tmp_path / "dmq.toml"))
                    config = load()
                    for file in (config.acl, Path(variables.get("DMQ_CONFIG", mounts[0] / "none"))):
                        assert file is None or file.parent in mounts


def test_a_daemon_reached_from_afar_has_an_access_key() -> None:
    """A daemon that listens beyond its pod has a file of access keys; one that does not listens on loopback."""
    assert all("acl" in tomllib.loads(each["data"]["dmq.toml"]) for each in of_kind("ConfigMap"))
    for _, container in pods():
        variables = {each["name"]: each["value"] for each in container["env"]}
        if "DMQ_CONFIG" not in variables:
            assert variables["DMQ_LISTEN"].startswith("127.0.0.1:")


def test_the_pods_have_no_rights() -> None:
    """The user of the image, a root that is read-only, no capabilities, no token of Kubernetes."""
    for pod, container in pods():
        context = {**pod["securityContext"], **container["securityContext"]}
        assert context["runAsNonRoot"] is context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is pod["automountServiceAccountToken"] is False
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (10001, 10001, 10001)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_check_changes_no_file_of_a_store() -> None:
    """Kubernetes changes them when the root of the volume is not as it left it: the store is not that root."""
    data = Path(image_variables()["DMQ_DATA"])
    for pod, container in pods():
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        assert str(data.parent) in [each["mountPath"] for each in container["volumeMounts"]]


def test_a_volume_outlives_its_pod() -> None:
    """Nothing removes what waits, and no two pods have it at a time."""
    for each in of_kind("StatefulSet"):
        assert set(each["spec"]["persistentVolumeClaimRetentionPolicy"].values()) == {"Retain"}
        claims = {one["metadata"]["name"]: one["spec"] for one in each["spec"]["volumeClaimTemplates"]}
        assert all(spec["accessModes"] == ["ReadWriteOncePod"] for spec in claims.values())
        containers = [*(pod := each["spec"]["template"]["spec"])["containers"], *pod.get("initContainers", ())]
        mounted = {one["name"] for container in containers for one in container.get("volumeMounts", ())}
        assert claims.keys() <= mounted


def test_probes_ask_where_the_daemon_answers() -> None:
    """Not on a port of loopback, which the kubelet does not reach."""
    variables = image_variables()
    assert f"127.0.0.1:{variables['DMQ_METRICS_LISTEN'].rpartition(':')[2]}/healthz" in DOCKERFILE.read_text("utf-8")
    for _, container in pods():
        listens = {**variables, **{each["name"]: each["value"] for each in container["env"]}}
        reached = {
            int(port)
            for host, _, port in (listens[name].rpartition(":") for name in ("DMQ_LISTEN", "DMQ_METRICS_LISTEN"))
            if host == "0.0.0.0"
        }
        named = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert set(named.values()) == reached
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            match container[probe]:
                case {"grpc": asked}:  # the other services also report a stalled disk
                    assert (asked["port"] in reached, asked["service"]) == (True, "liveness")
                case {"httpGet": asked}:
                    assert asked == {"path": "/healthz", "port": "metrics"}
                case {"exec": asked}:
                    assert asked["command"][0] == "dmq"


def test_selectors_match_their_pods() -> None:
    """Services, the budget and the network policy mean the pods that there are, and ports by the names they have."""
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind("StatefulSet")]
    selectors = [each["spec"]["selector"] for each in of_kind("Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind("PodDisruptionBudget")]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind("NetworkPolicy")]
    for selector in selectors:
        own = {key: value for key, value in selector.items() if key != "statefulset.kubernetes.io/pod-name"}
        assert any(own.items() <= each.items() for each in labels)
    names = {each["name"] for _, container in pods() for each in container["ports"]}
    served = [port["targetPort"] for each in of_kind("Service") for port in each["spec"].get("ports", ())]
    rules = [rule for each in of_kind("NetworkPolicy") for rule in each["spec"]["ingress"]]
    assert {*served, *(port["port"] for rule in rules for port in rule["ports"])} <= names
    headless = {each["metadata"]["name"] for each in of_kind("Service") if each["spec"].get("clusterIP") == "None"}
    assert {each["spec"]["serviceName"] for each in of_kind("StatefulSet")} == headless


def test_the_service_of_a_pair_leads_to_the_primary() -> None:
    """A standby lives and is never ready. Nothing waits for it to be: no rollout, no order of pods, no budget."""
    found = {each["kind"]: each for each in objects(DEPLOY / "kubernetes" / "replicated.yaml")[::-1]}
    pair, service = found["StatefulSet"]["spec"], found["Service"]["spec"]
    assert (pair["replicas"], pair["podManagementPolicy"]) == (2, "Parallel")
    assert pair["updateStrategy"] == {"type": "OnDelete"}
    assert pair["template"]["spec"]["affinity"]["podAntiAffinity"].keys() == {
        "requiredDuringSchedulingIgnoredDuringExecution"
    }
    (container,) = pair["template"]["spec"]["containers"]
    readiness = container.pop("readinessProbe")
    assert readiness["httpGet"] == {"path": "/healthz", "port": "metrics"}
    others = {name: probe["grpc"] for name, probe in container.items() if name.endswith("Probe")}
    assert others == {key: {"port": 8081, "service": "liveness"} for key in ("startupProbe", "livenessProbe")}
    assert "PodDisruptionBudget" not in found
    assert service["selector"] == pair["selector"]["matchLabels"]
    assert not service.get("publishNotReadyAddresses")


def test_the_image_is_that_of_this_version() -> None:
    """Manifests name the version of the project, and no registry."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {container["image"] for _, container in pods()} == {f"rock-dmq:{project['version']}"}
