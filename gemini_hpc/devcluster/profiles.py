"""Named sets of Slurm and gemini settings that a cluster can be started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemini_hpc.devcluster.errors import DevclusterError

Setting = str | int | float | bool


@dataclass(frozen=True)
class Profile:
    """A set of settings.

    `slurm` goes into slurm.conf and `gemini` into gemini.toml. Both override the values common to all
    profiles.
    """

    name: str
    sentence: str
    slurm: Mapping[str, str] = field(default_factory=dict)
    gemini: Mapping[str, Setting] = field(default_factory=dict)
    # Each partition has all nodes; the first is the default.
    partitions: tuple[str, ...] = ("main",)
    # slurmdbd with its own MariaDB; every job needs an association, and limits apply
    accounting: bool = False
    # nodes have no configuration files, and slurmd fetches them from slurmctld
    configless: bool = False
    # the kernel holds jobs to their --mem
    memory_limits: bool = False
    # a munged on each node instead of one for all hosts
    munge_per_node: bool = False


FAST = Profile(
    "fast",
    "timers tuned so that failures are noticed within seconds",
    slurm={
        # Values below 5 are silently ignored, and the default of 120 s delays every requeue.
        "AuthInfo": "cred_expire=5",
        "SlurmdTimeout": "10",
        "SlurmctldTimeout": "30",
        "TCPTimeout": "1",
        "MessageTimeout": "5",
        "BatchStartTimeout": "10",
        "KillWait": "2",
        # A small value drains survivors when a batch host dies.
        "UnkillableStepTimeout": "60",
        "CompleteWait": "0",
        "InactiveLimit": "0",
        "MinJobAge": "300",
        "SchedulerParameters": "sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,"
        "requeue_setup_env_fail,nohold_on_prolog_fail",
    },
    gemini={
        "heartbeat_s": 0.1,
        "heartbeat_missed": 4,
        "fence_confirm_s": 0.4,
        "fence_budget_nodes": 4,
        "fence_budget_user_nodes": 4,
        "slurm_settle_s": 1.0,
    },
)
STOCK = Profile(
    "stock",
    "Slurm's default timers",
    slurm={"SchedulerParameters": "nohold_on_prolog_fail"},
    # With the default of a minute every new cluster would wait before its first recovery.
    gemini={"slurm_settle_s": 1.0},
)
SITE = Profile(
    "site",
    "Slurm's default timers, slurmdbd with limits and QOS, memory limits, priority/multifactor, munged on each node, "
    "configless",
    slurm={
        **STOCK.slurm,
        "PriorityType": "priority/multifactor",
        "PriorityMaxAge": "1-0",
        "PriorityWeightAge": "10000",
        "PriorityWeightQOS": "100000",
    },
    gemini=STOCK.gemini,
    partitions=("batch", "debug"),
    accounting=True,
    configless=True,
    memory_limits=True,
    munge_per_node=True,
)
PROFILES = {profile.name: profile for profile in (FAST, STOCK, SITE)}


def find_profile(name: str) -> Profile:
    """Return the profile of this name."""
    if name not in PROFILES:
        raise DevclusterError(f"there is no profile {name!r}: choose from {', '.join(PROFILES)}")
    return PROFILES[name]
