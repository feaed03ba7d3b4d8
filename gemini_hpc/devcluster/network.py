"""Bridge, links and rates of a cluster, all in the cluster's own network namespaces."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.requirements import find_program

CONTROLLER = "ctl"
CONTROLLER_ADDRESS = "10.77.0.1"
MAX_NODES = 64
# of a shaped link, in seconds at its rate: unused credit it may save up, and the queue in front of it
BUCKET_S, QUEUE_S = 50e-6, 0.05
MTU_BYTES, SEGMENT_BYTES = 1514, 65536
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?bit)")


def list_node_names(count: int) -> list[str]:
    """Return the names of the first `count` nodes."""
    return [f"n{number}" for number in range(1, count + 1)]


def derive_node_address(node: str) -> str:
    """Return a node's IPv4 address."""
    return f"10.77.0.{10 + int(node[1:])}"


def _run_batch(name: str, pid: int, lines: Sequence[str]) -> None:
    """Run a batch of `ip` or `tc` lines in the network namespace of a process."""
    command = [find_program("nsenter"), "-t", str(pid), "-n", find_program(name), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode:
        raise DevclusterError(f"{name} failed in the cluster's network: {' '.join(done.stderr.split())}")


def create_bridge(outer: int) -> None:
    """Create the bridge of the cluster on the controller host."""
    _run_batch(
        "ip",
        outer,
        [
            "link set lo up",
            # The bridge needs its own address. By default it has the lowest of its ports', which changes with
            # a node's power cut, and then all neighbour entries for the controller host are stale for
            # seconds.
            "link add br0 address 02:00:0a:4d:00:01 type bridge forward_delay 0 mcast_snooping 0",
            f"addr add {CONTROLLER_ADDRESS}/24 dev br0",
            "link set br0 up",
        ],
    )


def acknowledge_at_once(outer: int) -> None:
    """Disable delayed acknowledgements on connections of the controller host with itself.

    slurmdbd's protocol writes length and message separately. Each message would otherwise wait 40 ms for a
    delayed acknowledgement.
    """
    address = f"{CONTROLLER_ADDRESS} dev br0 proto kernel scope host src {CONTROLLER_ADDRESS}"
    _run_batch("ip", outer, [f"route change table local local {address} quickack 1"])


def plug(outer: int, node: str, node_pid: int) -> None:
    """Connect a node to the network.

    The hardware address is the same at every start, so neighbours' caches stay right.
    """
    port, number = f"v{node}", int(node[1:])
    mac = f"02:00:0a:4d:00:{10 + number:02x}"
    _run_batch(
        "ip",
        outer,
        [
            f"link add {port} type veth peer name eth0 address {mac} netns {node_pid}",
            f"link set {port} master br0 up",
        ],
    )
    _run_batch(
        "ip",
        node_pid,
        ["link set lo up", f"addr add {derive_node_address(node)}/24 dev eth0", "link set eth0 up"],
    )


def unplug(outer: int, node: str) -> None:
    """Remove a node's link from both ends at once, so that later packets of the node do not arrive."""
    _run_batch("ip", outer, [f"link del v{node}"])


def parse_rate(rate: str) -> float:
    """Return the bits per second of a rate in tc's notation: 1gbit, 200mbit, 64kbit."""
    found = _RATE.fullmatch(rate)
    if not found or float(found[1]) <= 0:
        raise DevclusterError(f"rate {rate!r} is not understood: write 1gbit, 200mbit, 64kbit, or off")
    return float(found[1]) * _UNITS[found[2]]


def limit_link(outer: int, node: str, node_pid: int, rate: str | None) -> None:
    """Limit traffic to and from a node; None removes the limit.

    A real wire saves up nothing while it is silent. tbf is therefore unsuitable. Its bucket must hold a
    segment of 64 KB, and lends each sender a free millisecond of the link after a pause. Figure 16 showed
    3.5 % more with it. htb lets a segment pass on credit. Its bucket need only bridge a late timer.
    """
    for pid, device in ((outer, f"v{node}"), (node_pid, "eth0")):
        if "htb" in _read_qdisc(pid, device):  # htb cannot be changed in place
            _run_batch("tc", pid, [f"qdisc del dev {device} root"])
        if rate is None:
            continue
        bytes_per_s = parse_rate(rate) / 8
        bucket = max(round(bytes_per_s * BUCKET_S), MTU_BYTES)
        queue = max(round(bytes_per_s * QUEUE_S), 4 * SEGMENT_BYTES)
        _run_batch(
            "tc",
            pid,
            [
                f"qdisc add dev {device} root handle 1: htb default 1",
                f"class add dev {device} parent 1: classid 1:1 "
                f"htb rate {rate} burst {bucket} cburst {bucket} quantum {SEGMENT_BYTES}",
                f"qdisc add dev {device} parent 1:1 handle 10: bfifo limit {queue}",
            ],
        )


def _read_qdisc(pid: int, device: str) -> str:
    command = [find_program("nsenter"), "-t", str(pid), "-n", find_program("tc"), "qdisc", "show", "dev", device]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def listens(pid: int, port: int) -> bool:
    """Return whether a process listens on a TCP port in the network namespace of `pid`."""
    return re.search(rf":{port:04X} \S+ 0A ", Path(f"/proc/{pid}/net/tcp").read_text()) is not None
