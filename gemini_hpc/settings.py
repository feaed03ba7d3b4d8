"""All site settings, with their bounds and their descriptions in the administrators' guide (Markdown).

Root's prolog and epilog read them, so only the standard library is imported here. The table in docs/admin.md
is generated from them by `python -m tests.docs.tables`.
"""

from __future__ import annotations

import pwd
from dataclasses import dataclass, field
from typing import Any

UNBOUNDED = 1e18
AUTHS = ("munge", "key")
SLURM_APIS = ("auto", "pyslurm", "json", "commands")
RDMA_OFF, RDMA_AUTO = "off", "auto"
OBSERVE, CANARY, ACT = "observe", "canary", "act"
MODES = (OBSERVE, CANARY, ACT)


class ConfigError(ValueError):
    """The error that the settings cannot be used; it names the key and both the wanted and the found value."""


def _declare(default: Any, text: str, least: float = 0, most: float = UNBOUNDED) -> Any:
    return field(default=default, metadata={"text": text, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a site. Durations are seconds, sizes are bytes."""

    cluster_name: str = _declare(
        "cluster",
        "Name of this cluster; Slurm's may differ. Agents and controllers of another name are refused.",
    )
    run_dir: str = _declare(
        "/run/gemini-hpc",
        "Root's directory, with one for each job. Another one also needs `run_dir=DIR` behind the plugin in "
        "`plugstack.conf`.",
    )
    state_dir: str = _declare("/var/lib/gemini-hpc", "[Directory](#files-sockets-and-logs) of the controller.")
    slurm_user: str = _declare(
        "slurm",
        "SlurmUser, who runs the controller; one uid on all hosts.",
    )
    auth: str = _declare(
        "munge",
        'Authentication between agents and controllers: `"munge"` or [`"key"`](#without-munge).',
    )
    controller_host: str = _declare(
        "",
        "Hosts of the controller, as agents dial them: all slurmctld hosts, separated by commas. Empty: "
        "[none](#without-a-controller).",
    )
    controller_port: int = _declare(7321, "Its TCP port.", 1, 65535)
    slurmd_port: int = _declare(6818, "Port of slurmd if Slurm's node record names none.", 1, 65535)
    agent_port_base: int = _declare(17000, "First TCP [port](#ports) of the agents.", 1, 65519)
    agent_port_count: int = _declare(4096, "Number of these ports.", 16, 65535)
    interface: str = _declare(
        "",
        "Network interface whose IPv4 address agents listen on. Empty, or without an address: all. If set, "
        "`report`, and `inspect` without a controller, find agents only at Slurm's address of the node.",
    )
    peer_address: str = _declare(
        "{host}",
        "Name by which agents dial each other; `{host}` is the node's name in Slurm. It must resolve to the "
        'address of `interface`, e.g. `"{host}-ib0"`.',
    )
    rdma: str | tuple[str, ...] = _declare(
        RDMA_OFF,
        '[RDMA between agents](#rdma), never run on a device yet: `"off"`, `"auto"` (the first active port), '
        'or devices in order, such as `["mlx5_0:1"]`.',
    )
    mode: str = _declare(
        ACT,
        '`"act"`, `"canary"` or `"observe"`: where the controller [acts on Slurm](first_month.md).',
    )
    canary_partitions: tuple[str, ...] = _declare((), 'Partitions in which mode `"canary"` acts.')
    heartbeat_s: float = _declare(0.5, "Interval of agents' heartbeats.", 0.01, 60)
    heartbeat_missed: int = _declare(3, "Missed heartbeats until a peer is suspected and probed.", 1, 1000)
    attach_timeout_s: float = _declare(
        10.0,
        "Longest wait of the prolog until all agents agree. Then the job starts unprotected.",
        0.1,
        50,
    )
    self_fence_s: float = _declare(
        30.0,
        "Time without any peer *and* without the controller until an agent ends its ranks (SIGTERM, 2 s "
        "later SIGKILL): the job may run elsewhere. A last call to both must fail. Never in a job of one "
        "node, or without a controller.",
        0,
        86400,
    )
    strict_prolog: bool = _declare(
        False,
        "Fail the prolog if no agent can be started; Slurm then drains the node. It does not fail if an "
        "agent refuses, or if a user prevents the start.",
    )
    retention_s: float = _declare(900.0, "Life of copies after a job's end without success.", 0)
    held_retention_s: float = _declare(
        86400.0,
        "Life of copies of a held or pending job. With a tier, or without a controller, `retention_s` holds.",
        0,
    )
    memory_fraction: float = _declare(
        0.5,
        "Share of a node's physical memory for the copies of [all jobs](#a-jobs-share).",
        0,
        1,
    )
    memory_cap_bytes: int = _declare(0, "Limit of this memory in bytes. 0: `memory_fraction`.", 0)
    agent_cgroup: str = _declare(
        "",
        'Memory [cgroup of the agents](#the-agents-cgroup), such as `"/gemini-hpc"`. Empty: chosen. '
        '`"none"`: slurmd\'s.',
    )
    memory_floor_bytes: int = _declare(
        256 << 20,
        "Free memory that [copies leave](#memory-and-retention).",
        0,
    )
    agent_cores: float = _declare(
        0.0,
        "[Cores](#the-agents-processors) that one agent may use on average. 0: a sixteenth of the node's, "
        "0.5 at least.",
        0,
        100000,
    )
    agent_restarts: int = _declare(5, "Restarts of a dead agent. A life of over a minute resets the count.", 0)
    stalled_s: float = _declare(
        120.0,
        "Shortest time without a step until `inspect` shows a training as [stalled](reference.md#stalled).",
        1,
        86400,
    )
    hang_s: float = _declare(
        480.0,
        "Shortest time for which one rank keeps the others waiting until the training "
        "[hangs](training.md#hangs). For one job: `--gemini-hang`.",
        0,
        604800,
    )
    fence_confirm_s: float = _declare(
        5.0,
        "Silence of slurmd *and* agent until [the controller acts](#what-the-controller-does-to-slurm-and-when).",
        0,
    )
    slurm_settle_s: float = _declare(
        60.0,
        "Time for which slurmctld must have been up, and have answered, before any node is fenced.",
        0,
    )
    fence_budget_nodes: int = _declare(
        2,
        "Nodes that may be [fenced](#budget-and-vetoes) in one window; 1 % of the cluster if that is more. 0: none.",
        0,
    )
    fence_budget_user_nodes: int = _declare(
        2, "Of these, nodes of one user's jobs; half of the budget if that is more.", 0
    )
    fence_budget_window_s: float = _declare(600.0, "Length of that window.", 0)
    alert_program: str = _declare(
        "",
        "Program that the controller runs for an [alert](#alerts).",
    )
    auto_resume_s: float = _declare(
        0.0,
        "Time for which slurmd on a fenced and booted node must answer until the controller resumes it (60 "
        "is good), twice a day at most.",
        0,
    )
    recoveries_without_progress: int = _declare(
        5,
        "Incarnations in a row that lost nodes and sealed no newer version, until a job is "
        "[held](#what-the-controller-does-to-slurm-and-when).",
        0,
        1000,
    )
    reserve_candidates: int = _declare(2, "Nodes to reserve beside the survivors and one for each dead node.", 0)
    tier: str = _declare(
        "",
        'Directory of the persistent tier for jobs that name none, such as `"/lustre/{user}/gemini"`. '
        "`{user}`, the job's owner, must own it. A missing one is made (0700) when a job begins, if its "
        "parent exists and permits that.",
    )
    tier_interval_s: float = _declare(600.0, "Time between two saves, for jobs that name none.", 1, 604800)
    node_losses_per_day: float = _declare(
        0.0075,
        "Losses of a node with its memory, per node and day, for `--gemini-tier-interval=auto`: half of "
        "GEMINI's rate. [Find yours](dev/reproduction.md#how-often-nodes-fail).",
        0,
        100,
    )
    tier_bytes_per_s: float = _declare(
        5e8,
        "Highest rate at which a node writes to the tier, at the lowest priority. 0: unlimited. Writers "
        "bypass the page cache if the file system can, but not with `tier_compress`.",
        0,
        1000000000000.0,
    )
    tier_before_end_s: float = _declare(
        60.0,
        "Time before the time limit at which one more version is saved; twice the last save's duration if "
        "that is longer.",
        0,
        86400,
    )
    tier_flush_s: float = _declare(
        120.0,
        "Time to write a job's last version, after an end without success, before memory is freed.",
        0,
        86400,
    )
    tier_salvage_s: float = _declare(
        60.0,
        "Time from a node's loss, without the job's return, until the others save its newest version. 0: "
        "only before memory is freed.",
        0,
        86400,
    )
    tier_keep_last: int = _declare(2, "Newest versions of a job to keep.", 1, 1000000)
    tier_keep_every: int = _declare(0, "Keep every Nth saved version for good, too.", 0)
    tier_compress: bool = _declare(False, "Deflate tensors on the tier. Trained weights hardly shrink.")
    operators: tuple[str, ...] = _declare(
        (),
        "Users, and groups as `@group` (names or numbers), that may [inspect every job](security.md#boundaries).",
    )
    slurm_api: str = _declare(
        "auto",
        '[How the controller asks Slurm](#how-slurm-is-asked): `"auto"`, `"commands"`, `"json"` or `"pyslurm"`.',
    )
    failure_domains: str = _declare(
        "",
        'File of the nodes that [fail together](#failure-domains). Empty: Slurm\'s `topology.conf`. `"none"`: '
        "no file.",
    )
    health_check: str = _declare(
        "",
        "[Program](#health-check) (absolute path) that tests a node's health. Empty: no drain.",
    )
    sick_nodes_per_day: int = _declare(
        2,
        "Nodes that may be drained within a day after root's check found them red.",
        0,
    )
    lemon_days: float = _declare(
        30.0,
        "Days for which fences and red checks of a node are [remembered](#what-is-remembered).",
        0,
        3650,
    )
    metrics_file: str = _declare(
        "",
        "File (`*.prom`) for the [metrics](#metrics), for node_exporter's textfile collector.",
    )
    metrics_listen: str = _declare(
        "",
        'Address and port that serve the metrics, such as `"127.0.0.1:9417"`. Anyone who connects sees job '
        "numbers and user names.",
    )
    canary_program: str = _declare(
        "",
        "Program (absolute path) with which [`doctor --canary`](#the-canary) stops and starts slurmd.",
    )
    accepted_warnings: tuple[str, ...] = _declare(
        (),
        '[Checks](#doctor) whose warnings are counted but not shown, such as `["munge.version"]`. Wrong '
        "results are always shown.",
    )
    node_max_jobs_guard: bool = _declare(True, "Never fence a node on which a job of another owner runs.")

    def compute_heartbeat_timeout_s(self) -> float:
        """Return the silence, in seconds, after which a peer is suspected."""
        return self.heartbeat_s * self.heartbeat_missed

    def compute_detection_s(self) -> float:
        """Return how many seconds after a script's end an earlier loss may still be detected."""
        return 4.0 * self.compute_heartbeat_timeout_s()

    def format_address(self, host: str) -> str:
        """Return the name under which a peer is dialled."""
        return self.peer_address.replace("{host}", host)

    def list_controller_hosts(self) -> tuple[str, ...]:
        """Return the hosts on which a controller may be found, in the order in which they are tried."""
        return tuple(host.strip() for host in self.controller_host.split(",") if host.strip())

    def find_slurm_uid(self) -> int:
        """Return the uid of the SlurmUser. Raises `ConfigError` if the user is unknown here."""
        uid = _find_uid(self.slurm_user, -1)
        if uid < 0:
            raise ConfigError(f"slurm_user: there is no user {self.slurm_user!r} on this host")
        return uid

    def list_slurm_uids(self) -> tuple[int, ...]:
        """Return the uid of the SlurmUser, () if the user is unknown here."""
        uid = _find_uid(self.slurm_user, -1)
        return (uid,) if uid >= 0 else ()


def _find_uid(name: str, otherwise: int) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return otherwise
