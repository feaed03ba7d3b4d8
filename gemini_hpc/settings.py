"""All site settings, with their bounds and what the administrators' guide says of them.

The table in docs/admin.md is made from them: `python -m tests.docs.tables` writes it.
"""

from __future__ import annotations

import pwd
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

UNBOUNDED = 10**18

SlurmApi = Literal["auto", "pyslurm", "json", "commands"]


class ConfigError(ValueError):
    """The settings cannot be used; the message names the key, what was wanted and what was found."""


def _about(text: str) -> Meta:
    return Meta(description=text)


def _number(text: str, least: float, most: float = UNBOUNDED) -> Meta:
    return Meta(description=text, ge=least, le=most)


class Settings(msgspec.Struct, frozen=True):
    """All of them. Durations are seconds, sizes are bytes; texts are Markdown."""

    cluster_name: Annotated[
        str,
        _about(
            "Name of this cluster. Agents and controllers of another name are refused. It is not read from Slurm: "
            "set it."
        ),
    ] = "cluster"
    run_dir: Annotated[
        str,
        _about(
            "Root's directory, with one directory for each job (sockets, map file). The prolog makes it. If you "
            "change it, also set `run_dir=DIR` behind the plugin in `plugstack.conf`."
        ),
    ] = "/run/gemini-hpc"
    state_dir: Annotated[
        str,
        _about("The controller's journal, event logs and lock."),
    ] = "/var/lib/gemini-hpc"
    slurm_user: Annotated[
        str,
        _about(
            "SlurmUser. The controller runs as this user, and agents encrypt their greeting for its uid. The user "
            "must exist on all hosts."
        ),
    ] = "slurm"
    controller_host: Annotated[
        str,
        _about(
            "Host of the controller, as agents dial it. With backup slurmctlds: all of their hosts, separated by "
            "commas. Empty: no controller; only Slurm itself detects dead nodes."
        ),
    ] = ""
    controller_port: Annotated[
        int,
        _number(
            "TCP port of the controller.",
            1,
            65535,
        ),
    ] = 7321
    slurmd_port: Annotated[
        int,
        _number(
            "Port of slurmd to probe where Slurm's node record does not name one.",
            1,
            65535,
        ),
    ] = 6818
    agent_port_base: Annotated[
        int,
        _number(
            "First TCP port of the agents.",
            1,
            65519,
        ),
    ] = 17000
    agent_port_count: Annotated[
        int,
        _number(
            "Number of ports from there on. A job's agents try 16 of them, which follow from the job id.",
            16,
            65535,
        ),
    ] = 4096
    interface: Annotated[
        str,
        _about(
            "Network interface that agents listen on (its IPv4 address). Empty, or an interface without an "
            "address: all. If you set it, `report` (and `inspect` where there is no controller) only finds agents "
            "at the address that Slurm has for the node."
        ),
    ] = ""
    peer_address: Annotated[
        str,
        _about(
            "Name under which agents dial each other; `{host}` is the node's name in Slurm. Set it together with "
            '`interface`, e.g. to `"{host}-ib0"`: peers must reach the address that agents listen on.'
        ),
    ] = "{host}"
    heartbeat_s: Annotated[
        float,
        _number(
            "Interval of the heartbeats between agents.",
            0.01,
            60,
        ),
    ] = 0.5
    heartbeat_missed: Annotated[
        int,
        _number(
            "Missed heartbeats after which a peer is suspected and probed.",
            1,
            1000,
        ),
    ] = 3
    attach_timeout_s: Annotated[
        float,
        _number(
            "How long the prolog waits for the agents of all nodes to agree. Then the job starts without protection.",
            0.1,
            50,
        ),
    ] = 10.0
    self_fence_s: Annotated[
        float,
        _number(
            "A node that is cut off, not dead, goes on computing while its job runs elsewhere. An agent that has "
            "lost all peers *and* the controller for so long ends the ranks on its node (SIGTERM, after 2 s "
            "SIGKILL), if a last search finds no peer and the controller cannot be dialled. 0: never. Never on "
            "one node, or without a controller.",
            0,
            86400,
        ),
    ] = 30.0
    strict_prolog: Annotated[
        bool,
        _about(
            "Fail the prolog where no agent can be started: Slurm drains the node. Not where an agent refuses, or "
            "where a user keeps it from starting (processes, ports, signals)."
        ),
    ] = False
    retention_s: Annotated[
        float,
        _number(
            "How long replicas outlive a job that has ended without success.",
            0,
        ),
    ] = 900.0
    held_retention_s: Annotated[
        float,
        _number(
            "The same for a job without a tier that is held, or waits in the queue, and has not ended. (With a "
            "tier its last version is saved there, and `retention_s` holds.) Memory pressure ends it as for all "
            "others. Without a controller, which knows that the job waits, `retention_s` holds.",
            0,
        ),
    ] = 86400.0
    memory_fraction: Annotated[
        float,
        _number(
            "Share of a node's physical memory that replicas may take, for all agents of a node together (for "
            "each agent where they have no [cgroup of their own](#the-agents-cgroup)).",
            0,
            1,
        ),
    ] = 0.5
    memory_cap_bytes: Annotated[
        int,
        _number(
            "The same in bytes. 0: use `memory_fraction`.",
            0,
        ),
    ] = 0
    agent_cgroup: Annotated[
        str,
        _about(
            'Memory cgroup of the agents, from the top of the hierarchy, such as `"/gemini-hpc"`. Empty: '
            '[chosen](#the-agents-cgroup). `"none"`: agents stay in slurmd\'s.'
        ),
    ] = ""
    memory_floor_bytes: Annotated[
        int,
        _number(
            "Free memory that reservations leave untouched. A detached agent releases everything when the node "
            "has less.",
            0,
        ),
    ] = 256 << 20
    agent_restarts: Annotated[
        int,
        _number(
            "How often the supervisor starts a dead agent again. A life of more than a minute resets the count.",
            0,
        ),
    ] = 5
    stalled_s: Annotated[
        float,
        _number(
            "`inspect` shows a training as [stalled](training.md#when-something-fails) when its ranks have made "
            "no step for so long, and far longer than usual. Nothing else follows from it.",
            1,
            86400,
        ),
    ] = 120.0
    fence_confirm_s: Annotated[
        float,
        _number(
            "How long the controller's own probes of slurmd *and* agent must stay unanswered before it acts. "
            "Where connections are accepted, or refused, the kernel lives: that is an answer.",
            0,
        ),
    ] = 5.0
    slurm_settle_s: Annotated[
        float,
        _number(
            "No node is fenced until slurmctld has been up, and has answered the controller, for so long.",
            0,
        ),
    ] = 60.0
    fence_budget_nodes: Annotated[
        int,
        _number(
            "Nodes that the controller may fence in one window; 1 % of the cluster if that is more. 0: never fence.",
            0,
        ),
    ] = 2
    fence_budget_user_nodes: Annotated[
        int,
        _number(
            "How many of them for jobs of one user; half of the whole budget if that is more.",
            0,
        ),
    ] = 2
    fence_budget_window_s: Annotated[
        float,
        _number(
            "Length of that window.",
            0,
        ),
    ] = 600.0
    alert_program: Annotated[
        str,
        _about(
            "Program that the controller runs when it [stands aside](#budget-and-vetoes), with four arguments. "
            "Empty: none."
        ),
    ] = ""
    auto_resume_s: Annotated[
        float,
        _number(
            "Resume a node that we fenced once it has booted again and its slurmd has answered for so long (60 is "
            "a good value), at most twice a day. 0: never; an administrator resumes it.",
            0,
        ),
    ] = 0.0
    reserve_candidates: Annotated[
        int,
        _number(
            "Nodes to reserve as replacements beside the survivors, in addition to the number of dead nodes.",
            0,
        ),
    ] = 2
    tier: Annotated[
        str,
        _about(
            'Directory of the persistent tier for jobs that name none, such as `"/lustre/{user}/gemini"`. '
            "`{user}` is the job's owner, who must own it. When a job begins, a missing directory is made (mode "
            "0700) if the one above it exists and lets its user. Empty: none."
        ),
    ] = ""
    tier_interval_s: Annotated[
        float,
        _number(
            "Time from one save to the tier to the next, in jobs that name none.",
            1,
            604800,
        ),
    ] = 600.0
    tier_bytes_per_s: Annotated[
        float,
        _number(
            "Each node writes to the tier at this rate at most, behind everything else on it (nice 19, idle I/O "
            "class), past the page cache where the file system can (not with `tier_compress`). 0: unlimited.",
            0,
            1000000000000.0,
        ),
    ] = 5e8
    tier_before_end_s: Annotated[
        float,
        _number(
            "Save one more version to the tier so long before the job's time limit, or twice as long as the last "
            "save took if that is longer. 0: do not.",
            0,
            86400,
        ),
    ] = 60.0
    tier_flush_s: Annotated[
        float,
        _number(
            "How long, after a job's end without success, its last version may be written to the tier before the "
            "memory is freed. 0: not at all.",
            0,
            86400,
        ),
    ] = 120.0
    tier_scavenge_s: Annotated[
        float,
        _number(
            "When a job that has lost a node has not come back for so long, the other nodes save its newest "
            "version to its tier. 0: only before their memory is freed.",
            0,
            86400,
        ),
    ] = 60.0
    tier_keep_last: Annotated[
        int,
        _number(
            "Number of a job's newest versions to keep on the tier.",
            1,
            1000000,
        ),
    ] = 2
    tier_keep_every: Annotated[
        int,
        _number(
            "Keep every Nth saved version for good, in addition to the newest `tier_keep_last`. 0: none.",
            0,
        ),
    ] = 0
    tier_compress: Annotated[
        bool,
        _about("Compress tensors on the tier (deflate). Trained weights hardly shrink."),
    ] = False
    operators: Annotated[
        tuple[str, ...],
        _about(
            "Who may inspect every job, besides root and SlurmUser: users, and groups as `@group` (names or "
            "numbers). At the controller also slurmdbd's Operators and Administrators. Names are looked up on the "
            "host that answers, and kept for 30 s; in doubt the answer is no."
        ),
    ] = ()
    slurm_api: Annotated[
        SlurmApi,
        _about(
            'How the controller asks Slurm for jobs and nodes: `"commands"` (squeue, scontrol), `"json"` '
            '(scontrol --json), `"pyslurm"`, or `"auto"`: pyslurm where it is installed and fits Slurm\'s release, '
            "else commands. See [How Slurm is asked](#how-slurm-is-asked)."
        ),
    ] = "auto"
    node_max_jobs_guard: Annotated[
        bool,
        _about("Never fence a node on which a job of another owner runs."),
    ] = True

    def heartbeat_timeout_s(self) -> float:
        """Silence after which a peer is suspected, in seconds."""
        return self.heartbeat_s * self.heartbeat_missed

    def address_of(self, host: str) -> str:
        """Where a peer is dialled."""
        return self.peer_address.replace("{host}", host)

    def controller_hosts(self) -> tuple[str, ...]:
        """Hosts on which a controller may be found, in the order in which they are tried."""
        return tuple(host.strip() for host in self.controller_host.split(",") if host.strip())

    def slurm_uid(self) -> int:
        """uid of the SlurmUser. Raises `ConfigError` where the user is unknown here."""
        uid = _uid(self.slurm_user, -1)
        if uid < 0:
            raise ConfigError(f"slurm_user: there is no user {self.slurm_user!r} on this host")
        return uid

    def slurm_uids(self) -> tuple[int, ...]:
        """uid of the SlurmUser, or nothing where the user is unknown here."""
        uid = _uid(self.slurm_user, -1)
        return (uid,) if uid >= 0 else ()


def _uid(name: str, otherwise: int) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return otherwise
