"""The accounting of a cluster: slurmdbd, and the initial accounts, limits and QOS."""

from __future__ import annotations

import os
import pwd

from gemini_hpc import clock
from gemini_hpc.devcluster import database, enter, network, slurm
from gemini_hpc.devcluster.accounts import USERS
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.network import CONTROLLER
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.requirements import find_program
from gemini_hpc.devcluster.slurmconf import SLURMDBD_PORT

ACCOUNT = "lab"
# QOS -> its limits and priority; `normal`, Slurm's own, is everybody's default.
QOS = {"urgent": ("Priority=1000",), "single": ("MaxJobsPerUser=1",)}


def start(layout: ClusterFiles, outer: ProcessId) -> None:
    """Start the database and slurmdbd, and add the accounts and limits that slurmctld enforces.

    slurmdbd answers when the function returns.
    """
    network.acknowledge_at_once(outer.pid)
    database.start(layout, outer)
    _write_conf(layout)
    argv = [find_program("slurmdbd")]
    done = enter.complete(enter.start_command(enter.build_command(layout, outer.pid, argv)), None, 20.0)
    log, deadline = layout.log / "slurmdbd.log", clock.monotonic() + 20.0
    if done.returncode:
        raise DevclusterError(f"slurmdbd did not start: {' '.join(done.stderr.split()) or read_log_tail(log)}")
    while not network.listens(outer.pid, SLURMDBD_PORT):
        fatal = log.exists() and "fatal:" in log.read_text(errors="replace")
        if fatal or clock.monotonic() > deadline:
            raise DevclusterError(f"slurmdbd did not come up: {read_log_tail(log)}")
        clock.sleep(0.01)
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
        "StorageLoc": database.NAME,
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
