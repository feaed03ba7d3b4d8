"""The accounting of a cluster: MariaDB, slurmdbd, and the initial accounts, limits and QOS.

MariaDB is a separate server on a socket that only the cluster's controller host sees.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from gemini_hpc import clock
from gemini_hpc.devcluster import enter, network, services, slurm
from gemini_hpc.devcluster.accounts import USERS
from gemini_hpc.devcluster.configuration import SLURMDBD_PORT
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.network import CONTROLLER
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.requirements import find_program

ACCOUNT = "lab"
# QOS -> its limits and priority; `normal`, Slurm's own, is everybody's default.
QOS = {"urgent": ("Priority=1000",), "single": ("MaxJobsPerUser=1",)}
DATABASE = "slurm_acct_db"
# The places where slurmdbd searches, in the controller host's private /run. The choice depends on its client
# library (MariaDB's own from some release on).
_SOCKET = "/run/mysqld/mysqld.sock"
_OTHER_DIRECTORY = "/run/mariadbd"
# before MariaDB 11 the scripts were still named after MySQL
_SCRIPTS = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_PREFIXES = ("mysql", "mariadb")


def start(layout: ClusterFiles, outer: ProcessId) -> None:
    """Start the database and slurmdbd, and add the accounts and limits that slurmctld enforces.

    slurmdbd answers when the function returns.
    """
    network.acknowledge_at_once(outer.pid)
    _start_database(layout, outer)
    _write_conf(layout)
    services.start_daemon(layout, outer, "slurmdbd")
    services.wait_for_daemon(layout, outer, "slurmdbd", SLURMDBD_PORT, 20.0)
    _add_accounts(layout, outer)


def _write_conf(layout: ClusterFiles) -> None:
    owner = pwd.getpwnam("slurm")
    values = {
        "AuthType": "auth/munge",
        "DbdHost": CONTROLLER,
        "DbdPort": str(SLURMDBD_PORT),
        "SlurmUser": "slurm",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "slurm",
        "StorageLoc": DATABASE,
        "PidFile": "/run/slurmdbd.pid",
        "LogFile": str(layout.log / "slurmdbd.log"),
    }
    # slurmdbd refuses a file that other users could read.
    layout.slurmdbd_conf.touch(mode=0o600)
    layout.slurmdbd_conf.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    os.chown(layout.slurmdbd_conf, owner.pw_uid, owner.pw_gid)


def _add_accounts(layout: ClusterFiles, outer: ProcessId) -> None:
    users = ",".join(USERS)
    for line in (
        ("cluster", layout.name),
        *(("qos", name, *limits) for name, limits in QOS.items()),
        ("account", ACCOUNT, "GrpJobs=1000", "MaxSubmitJobs=500"),
        ("user", users, f"Account={ACCOUNT}", "MaxJobs=100", f"QOS=normal,{','.join(QOS)}", "DefaultQOS=normal"),
    ):
        slurm.ask(layout, outer, "sacctmgr", "-i", "add", *line)


def _start_database(layout: ClusterFiles, outer: ProcessId) -> None:
    """Start a new database server as user slurm; it answers when the function returns.

    Only the users slurm and root may use it.
    """
    owner = pwd.getpwnam("slurm")
    layout.database.mkdir(mode=0o700)
    os.chown(layout.database, owner.pw_uid, owner.pw_gid)
    log = layout.log / "mariadbd.log"
    server = [
        find_program("mariadbd"),
        # Ignore the settings of this machine's own server.
        "--no-defaults",
        "--user=slurm",
        f"--datadir={layout.database}",
        f"--lc-messages-dir={_find_scripts()[0].parent}",
        "--skip-networking",
        f"--socket={_SOCKET}",
        f"--pid-file={layout.database / 'mariadbd.pid'}",
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
        # The content dies with the cluster, so no write waits for the disk.
        "--innodb-flush-method=nosync",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-lock-wait-timeout=900",
    ]
    with log.open("a") as output:
        bootstrap = enter.start_command(
            enter.build_command(layout, outer.pid, [*server, "--bootstrap"]),
            subprocess.PIPE,
            output,
            subprocess.STDOUT,
        )
        if enter.complete(bootstrap, _build_schema(), 30.0).returncode:
            raise DevclusterError(f"mariadbd could not make its data directory: {read_log_tail(log)}")
        prepare = 'install -d -o slurm -g slurm "${0%/*}" && ln -sfn "${0%/*}" "$1" && shift && exec "$@"'
        argv = ["/bin/sh", "-c", prepare, _SOCKET, _OTHER_DIRECTORY, find_program("setsid"), "--fork", *server]
        enter.start_command(
            enter.build_command(layout, outer.pid, argv), stdout=output, stderr=subprocess.STDOUT
        ).wait(20.0)
    deadline = clock.monotonic() + 20.0
    while "ready for connections" not in (text := log.read_text(errors="replace")):
        if "[ERROR] Aborting" in text or clock.monotonic() > deadline:
            raise DevclusterError(f"mariadbd did not come up: {read_log_tail(log)}")
        clock.sleep(0.01)


def _find_scripts() -> list[Path]:
    """Return the scripts that create MariaDB's own tables and first users."""
    for directory in _SCRIPTS:
        for prefix in _PREFIXES:
            found = [directory / f"{prefix}_system_tables{part}.sql" for part in ("", "_data")]
            if all(path.exists() for path in found):
                return found
    raise DevclusterError(
        f"MariaDB's scripts (system_tables) are not in {' or '.join(map(str, _SCRIPTS))}: "
        "they are in the Debian package mariadb-server-core"
    )


def _build_schema() -> str:
    # Users are authenticated by their socket's uid, so there is no password that could leak.
    head = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket='slurm';\n"
    return head + "".join(path.read_text() for path in _find_scripts()) + f"\nCREATE DATABASE {DATABASE};\n"
