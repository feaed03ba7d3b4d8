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
OBSERVE, CANARY, ACT = "observe", "canary", "act"
MODES = (OBSERVE, CANARY, ACT)


class ConfigError(ValueError):
    """The error that the settings cannot be used; it names the key and both the wanted and the found value."""


def _setting(default: Any, text: str, least: float = 0, most: float = UNBOUNDED) -> Any:
    return field(default=default, metadata={"text": text, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a site. Durations are seconds, sizes are bytes."""

    cluster_name: str = _setting(
        "cluster",
        "Name of this cluster. Agents and controllers of another name are refused. It is not read from Slurm: set "
        "it.",
    )
    run_dir: str = _setting(
        "/run/gemini-hpc",
        "Root's directory, with one directory for each job (sockets, map file). The prolog makes it. If you "
        "change it, also set `run_dir=DIR` behind the plugin in `plugstack.conf`.",
    )
    state_dir: str = _setting("/var/lib/gemini-hpc", "The controller's journal, event logs and lock.")
    slurm_user: str = _setting(
        "slurm",
        "SlurmUser. The controller runs as this user, and agents encrypt their greeting for its uid. The user "
        "must exist on all hosts.",
    )
    auth: str = _setting(
        "munge",
        'How agents, controller and commands prove to each other who they are: `"munge"`, or `"key"`: by a key file '
        "that only root and SlurmUser read, [without MUNGE](#without-munge). The same on all hosts.",
    )
    controller_host: str = _setting(
        "",
        "Host of the controller, as agents dial it. With backup slurmctlds: all of their hosts, separated by "
        "commas. Empty: no controller; only Slurm itself detects dead nodes.",
    )
    controller_port: int = _setting(7321, "TCP port of the controller.", 1, 65535)
    slurmd_port: int = _setting(
        6818, "Port of slurmd to probe where Slurm's node record does not name one.", 1, 65535
    )
    agent_port_base: int = _setting(17000, "First TCP port of the agents.", 1, 65519)
    agent_port_count: int = _setting(
        4096, "Number of ports from there on. A job's agents try 16 of them, which follow from the job id.", 16, 65535
    )
    interface: str = _setting(
        "",
        "Network interface that agents listen on (its IPv4 address). Empty, or an interface without an address: "
        "all. If you set it, `report` (and `inspect` where there is no controller) only finds agents at the "
        "address that Slurm has for the node.",
    )
    peer_address: str = _setting(
        "{host}",
        "Name under which agents dial each other; `{host}` is the node's name in Slurm. Set it together with "
        '`interface`, e.g. to `"{host}-ib0"`: peers must reach the address that agents listen on.',
    )
    mode: str = _setting(
        ACT,
        'What the controller may do to Slurm. `"observe"`: nothing; it records what it would have done, and how '
        'Slurm itself judged ([the first month](first_month.md)). `"canary"`: it acts on jobs in '
        '`canary_partitions`, and observes elsewhere. `"act"`: all that '
        "[this page](#what-the-controller-does-to-slurm-and-when) says. Copies are kept in all modes.",
    )
    canary_partitions: tuple[str, ...] = _setting((), "Partitions in which the mode `canary` acts.")
    heartbeat_s: float = _setting(0.5, "Interval of the heartbeats between agents.", 0.01, 60)
    heartbeat_missed: int = _setting(3, "Missed heartbeats after which a peer is suspected and probed.", 1, 1000)
    attach_timeout_s: float = _setting(
        10.0,
        "How long the prolog waits for the agents of all nodes to agree. Then the job starts without protection.",
        0.1,
        50,
    )
    self_fence_s: float = _setting(
        30.0,
        "A node that is cut off, not dead, goes on computing while its job runs elsewhere. Its agent therefore ends "
        "the ranks (SIGTERM, after 2 s SIGKILL) when it has lost all peers *and* the controller for so long. First "
        "a last search must find no peer, and a call to the controller must fail. 0: never. Never on one node, or "
        "without a controller.",
        0,
        86400,
    )
    strict_prolog: bool = _setting(
        False,
        "Fail the prolog where no agent can be started: Slurm drains the node. Not where an agent refuses, or "
        "where a user keeps it from starting (processes, ports, signals).",
    )
    retention_s: float = _setting(900.0, "How long replicas outlive a job that has ended without success.", 0)
    held_retention_s: float = _setting(
        86400.0,
        "The same for a job without a tier that is held, or waits in the queue, and has not ended. (With a tier "
        "its last version is saved there, and `retention_s` holds.) Memory pressure ends it as for all others. "
        "Without a controller, which knows that the job waits, `retention_s` holds.",
        0,
    )
    memory_fraction: float = _setting(
        0.5,
        "Share of a node's physical memory that replicas may take, for all agents of a node together. Each job has "
        "[its share](#a-jobs-share) of that.",
        0,
        1,
    )
    memory_cap_bytes: int = _setting(0, "The same in bytes. 0: use `memory_fraction`.", 0)
    agent_cgroup: str = _setting(
        "",
        'Memory cgroup of the agents, from the top of the hierarchy, such as `"/gemini-hpc"`. Empty: '
        '[chosen](#the-agents-cgroup). `"none"`: agents stay in slurmd\'s.',
    )
    memory_floor_bytes: int = _setting(
        256 << 20,
        "Free memory that reservations leave untouched. A detached agent releases everything when the node has less.",
        0,
    )
    agent_cores: float = _setting(
        0.0,
        "Cores that one agent may use on average. Above that its training saves fewer versions: "
        "[agents' processors](#the-agents-processors). 0: a sixteenth of the node's, and 0.5 at least.",
        0,
        100000,
    )
    agent_restarts: int = _setting(
        5, "How often the supervisor starts a dead agent again. A life of more than a minute resets the count.", 0
    )
    stalled_s: float = _setting(
        120.0,
        "`inspect` shows a training as [stalled](training.md#when-something-fails) when its ranks have made no "
        "step for so long, and far longer than usual. Nothing else follows from it.",
        1,
        86400,
    )
    hang_s: float = _setting(
        480.0,
        "A training [hangs](training.md#hangs) when one rank has kept the others waiting for so long, and far longer "
        "than usual; its step is started again where somebody does that. 0: never. For one job: "
        "`--gemini-hang=SECONDS` or `off`.",
        0,
        604800,
    )
    fence_confirm_s: float = _setting(
        5.0,
        "How long the controller's own probes of slurmd *and* agent must stay unanswered before it acts. Where "
        "connections are accepted, or refused, the kernel lives: that is an answer.",
        0,
    )
    slurm_settle_s: float = _setting(
        60.0, "No node is fenced until slurmctld has been up, and has answered the controller, for so long.", 0
    )
    fence_budget_nodes: int = _setting(
        2, "Nodes that the controller may fence in one window; 1 % of the cluster if that is more. 0: never fence.", 0
    )
    fence_budget_user_nodes: int = _setting(
        2, "How many of them for jobs of one user; half of the whole budget if that is more.", 0
    )
    fence_budget_window_s: float = _setting(600.0, "Length of that window.", 0)
    alert_program: str = _setting(
        "",
        "Program that the controller runs when it [stands aside](#budget-and-vetoes), with four arguments. Empty: "
        "none.",
    )
    auto_resume_s: float = _setting(
        0.0,
        "Resume a node that we fenced once it has booted again and its slurmd has answered for so long (60 is a "
        "good value), at most twice a day. 0: never; an administrator resumes it.",
        0,
    )
    recoveries_without_progress: int = _setting(
        5,
        "Number of lives in a row in which a job lost nodes and sealed no newer version than before. Then the job is "
        "[held](#what-the-controller-does-to-slurm-and-when) in place of running again. 0: never.",
        0,
        1000,
    )
    reserve_candidates: int = _setting(
        2, "Nodes to reserve as replacements beside the survivors, in addition to the number of dead nodes.", 0
    )
    tier: str = _setting(
        "",
        'Directory of the persistent tier for jobs that name none, such as `"/lustre/{user}/gemini"`. `{user}` is '
        "the job's owner, who must own it. When a job begins, a missing directory is made (mode 0700) if the one "
        "above it exists and lets its user. Empty: none.",
    )
    tier_interval_s: float = _setting(
        600.0, "Time from one save to the tier to the next, in jobs that name none.", 1, 604800
    )
    node_losses_per_day: float = _setting(
        0.0075,
        "How often a node is lost with its memory, in a day, for `--gemini-tier-interval=auto`. The default is "
        "GEMINI's 1.5 % of nodes, half of them with their memory; "
        "[your own](dev/reproduction.md#how-often-nodes-fail).",
        0,
        100,
    )
    tier_bytes_per_s: float = _setting(
        5e8,
        "Each node writes to the tier at this rate at most. Writes come behind everything else on the node (nice 19, "
        "idle I/O class). They go past the page cache where the file system can, but not with `tier_compress`. 0: "
        "unlimited.",
        0,
        1000000000000.0,
    )
    tier_before_end_s: float = _setting(
        60.0,
        "Save one more version to the tier so long before the job's time limit, or twice as long as the last save "
        "took if that is longer. 0: do not.",
        0,
        86400,
    )
    tier_flush_s: float = _setting(
        120.0,
        "How long, after a job's end without success, its last version may be written to the tier before the "
        "memory is freed. 0: not at all.",
        0,
        86400,
    )
    tier_salvage_s: float = _setting(
        60.0,
        "When a job that has lost a node has not come back for so long, the other nodes save its newest version "
        "to its tier. 0: only before their memory is freed.",
        0,
        86400,
    )
    tier_keep_last: int = _setting(2, "Number of a job's newest versions to keep on the tier.", 1, 1000000)
    tier_keep_every: int = _setting(
        0, "Keep every Nth saved version for good, in addition to the newest `tier_keep_last`. 0: none.", 0
    )
    tier_compress: bool = _setting(False, "Compress tensors on the tier (deflate). Trained weights hardly shrink.")
    operators: tuple[str, ...] = _setting(
        (),
        "Who may inspect every job, besides root and SlurmUser: users, and groups as `@group` (names or numbers). "
        "At the controller also slurmdbd's Operators and Administrators. Names are looked up on the host that "
        "answers, and kept for 30 s; in doubt the answer is no.",
    )
    slurm_api: str = _setting(
        "auto",
        'How the controller asks Slurm for jobs and nodes: `"commands"` (squeue, scontrol), `"json"` (scontrol '
        '--json), `"pyslurm"`, or `"auto"`: pyslurm where it is installed and fits Slurm\'s release, else '
        "commands. See [How Slurm is asked](#how-slurm-is-asked).",
    )
    failure_domains: str = _setting(
        "",
        "File that says which nodes fail together (racks, switches), so that they do not hold copies for each other: "
        "[failure domains](#failure-domains). Empty: Slurm's `topology.conf` in `/etc/slurm` or `/run/slurm/conf`, "
        "where there is one. `\"none\"`: nodes side by side in the job's list hold each other's copies.",
    )
    health_check: str = _setting(
        "",
        "Program (absolute path) that finds whether a node is healthy. Launchers run it as the job's owner when a "
        "rank has failed there, root after the job: [health check](#health-check). Empty: no node is ever drained.",
    )
    sick_nodes_per_day: int = _setting(
        2,
        "Nodes that the controller may drain within a day because root's [health check](#health-check) found them "
        "red. 0: never drain.",
        0,
    )
    lemon_days: float = _setting(
        30.0,
        "For so many days the controller remembers that it has fenced a node, or that root has found it "
        "[red](#health-check): `doctor` and `inspect` show it; as a replacement it is chosen last. 0: not at all.",
        0,
        3650,
    )
    metrics_file: str = _setting(
        "",
        "File (`*.prom`) into which the controller writes its [figures](#metrics) every 15 s, for node_exporter's "
        "textfile collector. Empty: none.",
    )
    metrics_listen: str = _setting(
        "",
        'Address and port where the controller serves them, such as `"127.0.0.1:9417"`. Whoever can connect sees job '
        "numbers and user names. Empty: none.",
    )
    canary_program: str = _setting(
        "",
        "Program (absolute path) with which [`doctor --canary`](#the-canary) stops and starts a node's slurmd. "
        "Empty: no canary.",
    )
    accepted_warnings: tuple[str, ...] = _setting(
        (),
        'Checks of [doctor](#doctor) whose warnings this site accepts, such as `["munge.version"]`: they are counted '
        "and not shown. What is wrong is always shown.",
    )
    node_max_jobs_guard: bool = _setting(True, "Never fence a node on which a job of another owner runs.")

    def heartbeat_timeout_s(self) -> float:
        """Return the silence, in seconds, after which a peer is suspected."""
        return self.heartbeat_s * self.heartbeat_missed

    def afterwards_s(self) -> float:
        """Return how many seconds after a script's end an earlier loss may still be detected."""
        return 4.0 * self.heartbeat_timeout_s()

    def address_of(self, host: str) -> str:
        """Return the name under which a peer is dialled."""
        return self.peer_address.replace("{host}", host)

    def controller_hosts(self) -> tuple[str, ...]:
        """Return the hosts on which a controller may be found, in the order in which they are tried."""
        return tuple(host.strip() for host in self.controller_host.split(",") if host.strip())

    def slurm_uid(self) -> int:
        """Return the uid of the SlurmUser. Raises `ConfigError` if the user is unknown here."""
        uid = _uid(self.slurm_user, -1)
        if uid < 0:
            raise ConfigError(f"slurm_user: there is no user {self.slurm_user!r} on this host")
        return uid

    def slurm_uids(self) -> tuple[int, ...]:
        """Return the uid of the SlurmUser, () if the user is unknown here."""
        uid = _uid(self.slurm_user, -1)
        return (uid,) if uid >= 0 else ()


def _uid(name: str, otherwise: int) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return otherwise
