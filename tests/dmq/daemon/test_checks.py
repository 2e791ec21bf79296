"""What is known to be wrong before a start: each fault has a line, and looking touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.config.settings import DaemonConfig, load
from dmq.config.units import Address
from dmq.daemon.checks import problems_of, refuse_start
from dmq.errors import StartRefused, StoreCorrupt, with_advice
from dmq.rocketmq_server.transport.tls import self_signed


def _store_that_must_exist(folder: Path) -> tuple[str, str]:
    return "must_exist = true", f"{folder / 'data'} contains no store, and must_exist is set: mount its volume"


def _key_that_is_none(folder: Path) -> tuple[str, str]:
    path = folder / "wrong.toml"
    path.write_text("no key", encoding="utf-8")
    path.chmod(0o600)
    return f"acl = '{path}'", f"acl: {path}: "


def _certificate_that_is_none(folder: Path) -> tuple[str, str]:
    path = folder / "wrong.pem"
    path.write_text("no certificate", encoding="utf-8")
    return f"tls_certificate = '{path}'", "not a certificate and a key in PEM"


def _file_in_the_way(folder: Path) -> tuple[str, str]:
    path = folder / "file"
    path.touch()
    return f"data = '{path / 'data'}'", f"cannot be the directory of data: {path} is a file"


def _client_authority_that_is_none(folder: Path) -> tuple[str, str]:
    return f"tls_client_ca = '{folder / 'nothing.pem'}'", "tls_client_ca: "  # and the certificate is not made yet


def _client_authority_beside_a_certificate(folder: Path) -> tuple[str, str]:
    certificate, key = self_signed(folder / "tls", 1_800_000_000_000)
    return f"tls_certificate = '{certificate}'\ntls_key = '{key}'\ntls_client_ca = '{folder}'", "tls_client_ca: "


def _loop_of_links(folder: Path) -> tuple[str, str]:
    (folder / "loop").symlink_to("loop")
    return f"data = '{folder / 'loop' / 'data'}'", "cannot be the directory of data: Too many levels of symbolic links"


def _link_to_nothing(folder: Path) -> tuple[str, str]:
    (folder / "link").symlink_to("nothing")
    return f"data = '{folder / 'link'}'", "link is a link that leads to nothing"


def _backups_to_a_loop_of_links(folder: Path) -> tuple[str, str]:
    (folder / "loop").symlink_to("loop")
    return _backups(folder, to="loop"), "cannot be used: Too many levels of symbolic links"


def _cluster_authority_that_is_none(folder: Path) -> tuple[str, str]:
    cluster = "broker = 'rocketmq'\nendpoints = '127.0.0.1:1'\ncluster_tls = true\n"
    return f"{cluster}cluster_tls_ca = '{folder / 'nothing.pem'}'", "cluster_tls_ca: "


def _one_port_for_two(folder: Path) -> tuple[str, str]:
    return (
        "listen = '127.0.0.1:7'\nmetrics_listen = '127.0.0.1:7'",
        "are both 127.0.0.1:7: set another port for one of them",
    )


def _no_address_of_this_host(folder: Path) -> tuple[str, str]:
    return "listen = '192.0.2.1:8081'\ninsecure = true", "set listen to an address of this host"


def _backups(folder: Path, *, at: str = "0 3 * * *", zone: str = "Europe/Berlin", to: str = "") -> str:
    (folder / "backups").mkdir()
    return f"backup_at = '{at}'\nbackup_zone = '{zone}'\nbackup_dir = '{folder / (to or 'backups')}'"


def _backups_at_no_time(folder: Path) -> tuple[str, str]:
    return _backups(folder, at="25:00"), "backup_at = '25:00', backup_zone = 'Europe/Berlin': "


def _backups_in_no_zone(folder: Path) -> tuple[str, str]:
    return _backups(folder, zone="Mars/X"), "the time zone 'Mars/X' is not known on this host"


def _backups_to_a_disk_that_is_not_mounted(folder: Path) -> tuple[str, str]:
    return _backups(folder, to="backups/nothing"), "nothing does not exist: mount its disk, or create the folder"


def _backups_to_a_file(folder: Path) -> tuple[str, str]:
    (folder / "file").touch()
    return _backups(folder, to="file"), "file is a file: set it to a folder"


@pytest.mark.parametrize(
    "wrong",
    [
        _store_that_must_exist,
        *(_key_that_is_none, _certificate_that_is_none, _file_in_the_way, _client_authority_that_is_none),
        *(_client_authority_beside_a_certificate, _loop_of_links, _link_to_nothing, _backups_to_a_loop_of_links),
        *(_cluster_authority_that_is_none, _one_port_for_two, _no_address_of_this_host),
        *(_backups_at_no_time, _backups_in_no_zone, _backups_to_a_disk_that_is_not_mounted, _backups_to_a_file),
    ],
    ids=lambda each: each.__name__,
)
def test_faults_are_found_and_nothing_is_touched(tmp_path: Path, wrong: Callable[[Path], tuple[str, str]]) -> None:
    """By the check and by the start, alone of all settings; the folder is as it was."""
    written, said = wrong(tmp_path)
    file = tmp_path / "dmq.toml"
    file.write_text(written, encoding="utf-8")
    config = load({"listen": "127.0.0.1:0"} if "listen" not in written else {}, config_file=file)
    if "data" not in written:
        config = config.model_copy(update={"data": tmp_path / "data"})
    there = sorted(tmp_path.rglob("*"))
    (problem,) = problems_of(config, ManualClock())
    assert said in problem
    with pytest.raises(StartRefused) as refused:
        refuse_start(config, ManualClock())
    assert str(refused.value) == problem
    assert sorted(tmp_path.rglob("*")) == there


def test_a_folder_of_reports_prevents_no_start(tmp_path: Path) -> None:
    """The check names its fault, as that of the trail; the daemon starts without reports."""
    (tmp_path / "file").touch()
    config = DaemonConfig(
        data=tmp_path / "data",
        audit_reports=tmp_path / "file",
        listen=Address("127.0.0.1", 0),
        metrics_listen=None,
        console=None,
    )
    (problem,) = problems_of(config, ManualClock())
    assert problem == f"{tmp_path / 'file'} cannot be the directory of audit_reports: {tmp_path / 'file'} is a file"
    refuse_start(config, ManualClock())


def test_damage_names_the_command_to_inspect_it() -> None:
    """And not only what RocksDB says; once."""
    told = with_advice(StoreCorrupt("Corruption: block checksum mismatch"))
    assert told.startswith("Corruption: block checksum mismatch ('dmq store check' lists the damage;")
    assert with_advice(StoreCorrupt(told)) == told
