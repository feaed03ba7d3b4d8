"""The state of a cluster at one moment; `devcluster status --json` prints it as JSON."""

from __future__ import annotations

import contextlib
import subprocess

import msgspec

from gemini_hpc.devcluster import hosts, network, processes, services, slurm
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ROOT, ClusterFiles, load_cluster, read_rate
from gemini_hpc.devcluster.processes import ProcessId


class NodeStatus(msgspec.Struct, frozen=True):
    """The state of a node.

    Attributes:
        name: The node's name.
        address: Its IPv4 address.
        on: The node has power.
        pid: Host pid of the node's init, None if the node is off.
        slurm_state: The state that sinfo prints, "unknown" if Slurm does not answer.
        rate: The limit of its link as given to `limit_link`, None if there is none.
    """

    name: str
    address: str
    on: bool
    pid: int | None
    slurm_state: str
    rate: str | None


class ClusterStatus(msgspec.Struct, frozen=True):
    """The state of a cluster.

    `controller_pid` is the host pid of the gemini controller service, None if it does not run.
    """

    name: str
    profile: str
    directory: str
    outer_pid: int
    controller_pid: int | None
    plugin: bool
    prolog: bool
    epilog: bool
    nodes: list[NodeStatus]

    def __str__(self) -> str:
        parts = [part for part in ("plugin", "prolog", "epilog") if getattr(self, part)]
        controller = f"controller pid {self.controller_pid}" if self.controller_pid else "no controller"
        lines = [f"cluster {self.name}: profile {self.profile}, {', '.join(parts) or 'no site files'}, {controller}"]
        lines += [
            f"{node.name:<4} {node.address:<12} {'on' if node.on else 'OFF':<4} {node.slurm_state:<12} "
            f"{node.rate or ''}".rstrip()
            for node in self.nodes
        ]
        return "\n".join(lines)


def collect(layout: ClusterFiles, outer: ProcessId) -> ClusterStatus:
    """Query the hosts' inits and Slurm; if Slurm does not answer, the states stay "unknown"."""
    known, states = load_cluster(layout), dict[str, str]()
    with contextlib.suppress(DevclusterError, subprocess.TimeoutExpired):
        states = slurm.read_node_states(layout, outer)
    nodes = []
    for node in known.nodes:
        process = hosts.find_init(layout, node)
        nodes.append(
            NodeStatus(
                name=node,
                address=network.derive_node_address(node),
                on=process is not None,
                pid=process.pid if process else None,
                slurm_state=states.get(node, "unknown"),
                rate=read_rate(layout, node),
            )
        )
    controller = services.find_controller(layout, outer)
    return ClusterStatus(
        name=layout.name,
        profile=known.profile,
        directory=str(layout.directory),
        outer_pid=outer.pid,
        controller_pid=controller.pid if controller else None,
        plugin=known.plugin,
        prolog=known.prolog,
        epilog=known.epilog,
        nodes=nodes,
    )


def list_clusters() -> dict[str, bool]:
    """Return all clusters of this machine that have files, and whether each is alive."""
    try:
        found = sorted(entry.name for entry in ROOT.iterdir() if entry.is_dir())
    except FileNotFoundError:  # never made, or just removed with the last cluster
        return {}
    return {name: is_alive(ClusterFiles(name)) for name in found}


def is_alive(layout: ClusterFiles) -> bool:
    """Return whether a cluster's outer init is alive."""
    return processes.load_living(layout.outer) is not None
