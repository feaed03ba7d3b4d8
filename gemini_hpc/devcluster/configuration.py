"""The configuration files of a cluster: slurm.conf, plugstack.conf, cgroup.conf, gemini.toml and its key."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping, Sequence

from gemini_hpc.devcluster import cgroups, slurm
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.network import CONTROLLER, CONTROLLER_ADDRESS, derive_node_address
from gemini_hpc.devcluster.profiles import Profile, Setting
from gemini_hpc.devcluster.sitefiles import SiteFiles
from gemini_hpc.wire import keyed

SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SLURMDBD_PORT = 6819
# From this release on, slurmd ends if no cgroup plugin works, unless it is configured to use none. Before
# 23.11 that word was unknown, and made slurmd end.
CGROUPS_DISABLED_FROM = (23, 11)


def write_slurm_conf(
    layout: ClusterFiles,
    profile: Profile,
    nodes: Sequence[str],
    *,
    cpus: int,
    memory_mb: int,
    site: SiteFiles,
    extra: Sequence[str],
) -> None:
    """Write slurm.conf, plugstack.conf and cgroup.conf; `extra` are lines for the end of slurm.conf."""
    values = {
        "ClusterName": layout.name,
        "SlurmctldHost": f"{CONTROLLER}({CONTROLLER_ADDRESS})",
        "SlurmctldPort": str(SLURMCTLD_PORT),
        "SlurmdPort": str(SLURMD_PORT),
        "SlurmUser": "slurm",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "StateSaveLocation": str(layout.state),
        "SlurmdSpoolDir": f"{layout.spool}/%n",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.%n.pid",
        "SlurmctldLogFile": str(layout.log / "slurmctld.log"),
        "SlurmdLogFile": f"{layout.log}/slurmd.%n.log",
        **_choose_tracking(profile),
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": "100",
        # nodes are described as requested, regardless of the machine's real resources
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "JobRequeue": "1",
        "SchedulerType": "sched/backfill",
        "PrologFlags": "Alloc",
        **profile.slurm,
    }
    if profile.accounting:
        values |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": CONTROLLER,
            "AccountingStoragePort": str(SLURMDBD_PORT),
            "AccountingStorageEnforce": "associations,limits,qos",
        }
    if profile.configless:
        # plugstack.conf is found beside slurm.conf, wherever that is on a node
        values["SlurmctldParameters"] = "enable_configless"
    else:
        values["PlugStackConfig"] = str(layout.slurm_etc / "plugstack.conf")
    if site.prolog:
        values["Prolog"] = str(site.prolog)
    if site.epilog:
        values["Epilog"] = str(site.epilog)
    lines = [f"{key}={value}" for key, value in values.items()]
    lines += [
        f"NodeName={node} NodeAddr={derive_node_address(node)} CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN"
        for node in nodes
    ]
    lines += [
        f"PartitionName={name} Nodes={','.join(nodes)} Default={'YES' if name == profile.partitions[0] else 'NO'} "
        "MaxTime=INFINITE State=UP"
        for name in profile.partitions
    ]
    lines += extra
    layout.slurm_conf.write_text("\n".join(lines) + "\n")
    (layout.slurm_etc / "cgroup.conf").write_text(_build_cgroup_conf(profile))
    plugin = f"optional {site.plugin}\n" if site.plugin else ""
    (layout.slurm_etc / "plugstack.conf").write_text(plugin)


def _choose_tracking(profile: Profile) -> dict[str, str]:
    """Return how slurmd finds the processes of a job: as sites do, if this machine allows it."""
    if cgroups.find_tracking_problem():
        # Not linuxproc: it loses an srun whose batch script died first, and that srun later kills the step of
        # the same id in the job's next incarnation.
        return {"ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none"}
    return {
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/cgroup" if profile.memory_limits else "task/none",
    }


def _build_cgroup_conf(profile: Profile) -> str:
    if cgroups.find_tracking_problem():
        return "CgroupPlugin=disabled\n" if slurm.read_release() >= CGROUPS_DISABLED_FROM else ""
    limits = "ConstrainRAMSpace=yes\n" if profile.memory_limits else ""
    return f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n{limits}"


def write_settings(layout: ClusterFiles, profile: Profile, overrides: Mapping[str, Setting]) -> None:
    """Write the keys that every cluster needs, then the profile's, then those given to `bring_up`."""
    values: dict[str, Setting] = {
        "controller_host": CONTROLLER,
        "slurm_user": "slurm",
        "cluster_name": layout.name,
        "state_dir": str(layout.controller),
        # Nodes without their own hierarchy must not create cgroups in the machine's.
        **({} if cgroups.are_possible() else {"agent_cgroup": "none"}),
        **profile.gemini,
        **overrides,
    }
    lines = [f"{key} = {_format_toml(key, value)}\n" for key, value in values.items()]
    (layout.settings / "gemini.toml").write_text("".join(lines))
    if values.get("auth") == "key":
        path = layout.settings / "auth.key"
        keyed.make_key(str(path))
        os.chown(path, pwd.getpwnam("slurm").pw_uid, 0)  # the controller is started as this user


def _format_toml(key: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_toml(key, item) for item in value)}]"
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)
    raise DevclusterError(
        f"setting {key} = {value!r}: only strings, numbers, booleans and lists of them are possible"
    )
