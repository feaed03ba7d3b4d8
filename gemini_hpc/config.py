"""Site settings: `/etc/gemini-hpc/gemini.toml`, each with a default and a sentence; unknown keys are errors."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

CONFIG_PATH = "/etc/gemini-hpc/gemini.toml"
SLURM_APIS = ("auto", "pyslurm", "json", "commands")


class ConfigError(ValueError):
    """The settings file cannot be used; the message names the key, what was wanted and what was found."""


_KINDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of strings",
}


def _setting(default: Any, doc: str, least: float = 0, most: float = 1e18) -> Any:
    return field(default=default, metadata={"doc": doc, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Settings:
    """All site settings. Durations are seconds, sizes are bytes."""

    cluster_name: str = _setting("cluster", "Name of this cluster; part of every message's identity.")
    run_dir: str = _setting("/run/gemini-hpc", "Root-owned directory of per-job sockets and map files.")
    state_dir: str = _setting("/var/lib/gemini-hpc", "The controller's journal and event logs.")
    slurm_user: str = _setting("slurm", "The SlurmUser: the controller runs as it; agents answer to it.")
    controller_host: str = _setting(
        "", "Host of the controller, or several with commas between (slurmctld's backups); empty: no controller."
    )
    controller_port: int = _setting(7321, "TCP port of the controller.", 1, 65535)
    slurmd_port: int = _setting(6818, "TCP port of slurmd, probed before a node is fenced.", 1, 65535)
    agent_port_base: int = _setting(
        17000, "First TCP port of the agents; a job's ports follow from its id.", 1, 65519
    )
    agent_port_count: int = _setting(
        4096, "Number of TCP ports from agent_port_base on that agents may use.", 16, 65535
    )
    interface: str = _setting("", "Network interface that agents listen on (set peer_address too); empty: all.")
    peer_address: str = _setting("{host}", 'Name under which an agent\'s peers are dialled, e.g. "{host}-ib0".')
    heartbeat_s: float = _setting(0.5, "Interval of the heartbeats between agents.", 0.01, 60)
    heartbeat_missed: int = _setting(3, "Missed heartbeats after which a peer is suspected.", 1, 1000)
    attach_timeout_s: float = _setting(10.0, "Bound of the prolog's wait for the agents' agreement.", 0.1, 50)
    self_fence_s: float = _setting(
        30.0, "Without any peer and the controller for so long, an agent ends its local ranks; 0: never.", 0, 86400
    )
    strict_prolog: bool = _setting(False, "Fail the prolog when the agent cannot be started (drains the node).")
    retention_s: float = _setting(900.0, "How long replicas outlive a job's end without success.")
    held_retention_s: float = _setting(
        86400.0, "The same for a job without a tier that is held, or waits in the queue, and has not ended.", 0
    )
    memory_fraction: float = _setting(0.5, "Share of a node's memory that agents may use for replicas.", 0, 1)
    memory_cap_bytes: int = _setting(0, "The same in bytes; 0: by memory_fraction.")
    agent_cgroup: str = _setting(
        "", 'Memory cgroup of the agents, e.g. "/gemini-hpc"; empty: chosen; "none": slurmd\'s.'
    )
    memory_floor_bytes: int = _setting(256 << 20, "Free memory that reservations leave untouched.")
    agent_restarts: int = _setting(5, "How often the supervisor starts a dead agent again.")
    stalled_s: float = _setting(
        120.0, "A training without a step for so long, and far longer than usual, is shown as stalled.", 1, 86400
    )
    fence_confirm_s: float = _setting(5.0, "How long the controller's own probes must fail before it acts.")
    slurm_settle_s: float = _setting(60.0, "No fencing until slurmctld has been up and has answered for so long.")
    fence_budget_nodes: int = _setting(2, "Nodes that the controller may fence within fence_budget_window_s.")
    fence_budget_user_nodes: int = _setting(2, "Of these, for jobs of one user; in effect half of a large budget.")
    fence_budget_window_s: float = _setting(600.0, "Window of the fencing budgets.")
    alert_program: str = _setting(
        "", "Program that the controller runs when a budget is spent, with KIND JOB HOST TEXT; empty: none."
    )
    auto_resume_s: float = _setting(
        0.0, "A fenced node that has booted anew and answers for so long is resumed, twice a day at most; 0: never."
    )
    reserve_candidates: int = _setting(2, "Replacement candidates reserved beside the survivors and the dead count.")
    tier: str = _setting("", 'Tier of jobs that name none; "{user}" in it is the job\'s owner. Empty: none.')
    tier_interval_s: float = _setting(600.0, "Time between two saves to a tier, in jobs that say none.", 1, 604800)
    tier_bytes_per_s: float = _setting(5e8, "A node writes to the tier at this rate at most; 0: any.", 0, 1e12)
    tier_before_end_s: float = _setting(
        60.0, "Before a job's time limit one more version is saved to its tier, so long at least; 0: none.", 0, 86400
    )
    tier_flush_s: float = _setting(
        120.0, "After a job's end without success its last version may be written to the tier for so long.", 0, 86400
    )
    tier_scavenge_s: float = _setting(
        60.0,
        "A job that has lost a node and has not come back for so long has its last version saved to its tier by the "
        "other nodes; 0: only before their memory is freed.",
        0,
        86400,
    )
    tier_keep_last: int = _setting(2, "Versions of a job that stay on the tier.", 1, 1000000)
    tier_keep_every: int = _setting(0, "Every so manieth version saved to the tier stays for good; 0: none.", 0)
    tier_compress: bool = _setting(False, "Compress tensors on the tier (deflate).")
    operators: tuple[str, ...] = _setting(
        (), "Users, and groups written as @group, that may inspect every job, besides root and SlurmUser."
    )
    slurm_api: str = _setting(
        "auto",
        'How the controller asks Slurm for jobs and nodes: "commands" (squeue, scontrol), "json" (scontrol --json), '
        '"pyslurm" (where it fits Slurm\'s release); "auto": pyslurm where it is installed and fits, else commands.',
    )
    node_max_jobs_guard: bool = _setting(True, "Never fence a node on which another owner's job runs.")

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
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return otherwise


def _convert(key: str, want: Any, value: Any, least: float, most: float) -> Any:
    wanted = type(want)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= most else math.inf
    if wanted is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if type(value) is not wanted:
        raise ConfigError(f"{key}: wanted {_KINDS[wanted]}, found {_shown(value)}")
    if wanted in (int, float) and not least <= value <= most:
        limits = f"from {least:g} to {most:g}" if most < 1e18 else f">= {least:g}"
        raise ConfigError(f"{key}: wanted a number {limits}, found {_shown(value)}")
    if wanted is str and not value.isprintable():
        raise ConfigError(f"{key}: wanted printable text, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse(text: str, where: str = CONFIG_PATH) -> Settings:
    """Settings from TOML text. Raises `ConfigError` on bad syntax, unknown keys and wrong types."""
    import tomllib
    from difflib import get_close_matches

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{where}: not valid TOML: {str(exc)[:200]}") from None
    except (RecursionError, ValueError):  # nested without end, or a number of thousands of digits
        raise ConfigError(f"{where}: not TOML that can be settings") from None
    known = {f.name: f for f in fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            instead = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key[:80]!r}; {instead}")
        field_, limits = known[key], known[key].metadata
        try:
            values[key] = _convert(key, field_.default, value, limits["least"], limits["most"])
        except ConfigError as exc:
            raise ConfigError(f"{where}: {exc}") from None
    settings = Settings(**values)
    if settings.slurm_api not in SLURM_APIS:
        names = ", ".join(SLURM_APIS)
        raise ConfigError(f"{where}: slurm_api: wanted one of {names}, found {_shown(settings.slurm_api)}")
    if settings.agent_port_base + settings.agent_port_count > 65536:
        raise ConfigError(
            f"{where}: agent_port_base + agent_port_count: wanted at most 65536, found "
            f"{settings.agent_port_base + settings.agent_port_count}"
        )
    return settings


def load(path: str = CONFIG_PATH) -> Settings:
    """Settings of this host; the defaults where there is none of the usual name. Raises `ConfigError`, also for
    another file that is not there: somebody has named it, and means it."""
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read(1 << 20)
    except FileNotFoundError:
        if path != CONFIG_PATH:
            raise ConfigError(f"{path}: no such file; leave --config out for {CONFIG_PATH} or the defaults") from None
        return Settings()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid TOML: it is not UTF-8 text") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {os.strerror(exc.errno or 0)}") from None
    return parse(text, path)
