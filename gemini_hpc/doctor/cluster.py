"""The table of all nodes: doctor's document of each, gathered by one short `srun` a node.

Nodes that Slurm cannot use, or that are busy with jobs, are named with the reason. The whole takes a bounded time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from gemini_hpc import __version__, clock
from gemini_hpc.core import hostlist
from gemini_hpc.doctor.examine import sanitize_text
from gemini_hpc.doctor.finding import ACCEPTED, WARNING, WRONG, Finding
from gemini_hpc.report.columns import USUAL, align, fold
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.client import find_tool
from gemini_hpc.slurm.facts import Node

SCHEMA = 1
AT_ONCE = 16  # sruns at a time: a storm of small jobs would slow down slurmctld
BUSY_S = 10  # a node without a free CPU is left out after this
ONE_S = 110.0  # one node's doctor is bounded at 90 s, and Slurm needs a moment before and after
ALL_S = 600.0  # a table that takes longer is not waited for
MINUTES = 3  # time limit of the job, should srun be killed
MOST_BYTES = 4 << 20
DOCTOR = ("-I", "-m", "gemini_hpc.cli.main", "doctor", "--json", "--host-role", "node")
OK, DIFFERS, BAD, SILENT, UNASKED, BUSY = "ok", "differs", "wrong", "no answer", "not asked", "not asked (busy)"
_REFUSED = "unable to allocate resources: "  # srun, in lower case, for a node that it was not given
_REFUSED_BUSY = ("requested nodes are busy", "immediate execution impossible")  # the second: for a higher priority
_REFUSED_ASIDE = "required node not available"  # meanwhile down, drained or reserved


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """The facts about one node.

    Attributes:
        node: Name.
        state: State and flags in Slurm.
        status: `ok`, `wrong` (a check is), `differs` (release or settings), `no answer`, `not asked` or `not asked
            (busy)`.
        why: Reason, if no document came.
        version: Release there.
        settings_sha256: First digits of the digest of the settings there.
        agents: Jobs with an agent there.
        checks: Findings that are a warning, accepted or wrong.
    """

    node: str
    state: str
    status: str
    why: str = ""
    version: str = ""
    settings_sha256: str = ""
    agents: int | None = None
    checks: tuple[Finding, ...] = ()

    def count(self, status: str) -> int:
        """Return the number of checks with this status."""
        return sum(c.status == status for c in self.checks)


def find_obstacle(node: Node) -> str:
    """Return why no job can ask this node; "" if one can."""
    if node.is_up:
        return ""
    reason = f": {node.reason}" if node.reason and node.is_withheld else ""
    return f"{node.state_words}{reason}"


def build_command(node: Node, partition: str, config: str) -> list[str]:
    """Return the command that runs doctor on a node as root."""
    return [
        find_tool("srun"),
        *("-N1", "-n1", "-c1", "--mem=256M", f"--nodelist={node.name}", f"--partition={partition}"),
        *(f"--immediate={BUSY_S}", f"--time={MINUTES}", "--job-name=gemini-hpc-doctor", "--chdir=/", "--quiet"),
        *("--input=none", sys.executable, *DOCTOR, "--config", config),
    ]


def ask(argv: Sequence[str]) -> tuple[str, str]:
    """Run a command. Return its output, and the last line of its errors if there is no output."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, errors = process.communicate(timeout=ONE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # srun then ends its job
        try:
            process.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return "", f"no answer within {ONE_S:g} s"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no output")
    return out[:MOST_BYTES], "" if out.strip() else last


def build_row(node: Node, out: str, why: str, digest: str) -> ClusterRow:
    """Return a node's row from the output of its doctor.

    Args:
        node: The node.
        out: The output.
        why: The reason why there is none.
        digest: The digest of the settings on this host, with which the node's is compared.
    """
    state = node.state_words
    refused = why.lower().partition(_REFUSED)[2]
    if refused.startswith(_REFUSED_BUSY):
        return ClusterRow(node.name, state, BUSY, f"no free CPU or memory within {BUSY_S} s")
    if why:
        return ClusterRow(node.name, state, UNASKED if refused.startswith(_REFUSED_ASIDE) else SILENT, why)
    try:
        d = json.loads(out)
        found = msgspec.convert(d["checks"], list[Finding])
        checks = tuple(c for c in found if c.status in (WRONG, WARNING, ACCEPTED))
        version, settings, agents = str(d["version"]), str(d["settings_sha256"]), d["agents"]
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError):
        return ClusterRow(node.name, state, SILENT, f"no document: {sanitize_text(out)[:100]}")
    status = DIFFERS if (version, settings) != (__version__, digest) else OK
    status = BAD if any(c.status == WRONG for c in checks) else status
    return ClusterRow(node.name, state, status, "", version, settings, agents, checks)


def gather(
    nodes: Iterable[Node],
    partitions: dict[str, str],
    config: str,
    digest: str,
    asking: Callable[[Sequence[str]], tuple[str, str]] = ask,
) -> list[ClusterRow]:
    """Ask all nodes, some at a time. Return one row a node, in the order of the nodes.

    Args:
        nodes: The nodes.
        partitions: State of each partition by name.
        config: Path of the settings, the same on all hosts.
        digest: The digest of the settings on this host.
        asking: Runs a command, as `ask` does.
    """
    end = clock.monotonic() + ALL_S

    def ask_node(node: Node) -> ClusterRow:
        open_ones = [p for p in node.partitions if partitions.get(p) == "UP"]
        why = find_obstacle(node) or ("" if open_ones else "no partition of the node is UP")
        if not why and node.state == "ALLOCATED":  # srun would wait here: many such nodes take the time of others
            return ClusterRow(node.name, node.state_words, BUSY, "jobs have all CPUs")
        if not why and clock.monotonic() > end:
            why = f"no time left after {ALL_S:g} s"
        if why:
            return ClusterRow(node.name, node.state_words, UNASKED, why)
        try:
            return build_row(node, *asking(build_command(node, open_ones[0], config)), digest)
        except (OSError, SlurmError) as exc:
            return ClusterRow(node.name, node.state_words, SILENT, str(exc))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask_node, nodes))


def build_document(rows: Sequence[ClusterRow], host: str, digest: str, now: float) -> dict[str, Any]:
    """Return the document of schema 1, to which keys are only ever added."""
    return {
        "schema": SCHEMA,
        "t": now,
        "host": host,
        "version": __version__,
        "settings_sha256": digest,
        "status": int(any(r.status not in (OK, UNASKED, BUSY) for r in rows)),
        "nodes": [asdict(r) for r in rows],
    }


def format_table(rows: Sequence[ClusterRow], host: str, digest: str, columns: int = USUAL) -> str:
    """Return the table, then each finding once with its nodes, then the sum."""
    lines = [["NODE", "STATUS", "RELEASE", "SETTINGS", "AGENTS", "WRONG", "WARNINGS", "ACCEPTED", "SLURM"]]
    for r in rows:
        asked = not r.why
        agents = "-" if r.agents is None else str(r.agents)
        counts = [str(r.count(status)) if asked else "-" for status in (WRONG, WARNING, ACCEPTED)]
        lines.append([r.node, r.status, r.version or "-", r.settings_sha256 or "-", agents, *counts, r.state])
    shown = align(lines)
    nodes_by_finding: dict[tuple[str, str, str], list[str]] = {}
    for r in rows:
        if r.why:
            nodes_by_finding.setdefault((r.status, "", r.why), []).append(r.node)
        for c in r.checks:
            if c.status != ACCEPTED:
                nodes_by_finding.setdefault((c.status, c.check, c.found), []).append(r.node)
    indent = max((len(status) for status, _, _ in nodes_by_finding), default=0) + 1
    for (status, check, found), names in sorted(nodes_by_finding.items()):
        what = f"{check}: {found}" if check else found
        shown += fold(
            sanitize_text(f"{hostlist.compress(names)}: {what}"), columns, " " * indent, f"{status:<{indent}}"
        )
    shown += fold(
        f"{host}: release {__version__}, settings {digest or 'none'}, with which nodes are compared", columns
    )
    counts_of = {s: sum(r.status == s for r in rows) for s in (OK, DIFFERS, BAD, SILENT, UNASKED, BUSY)}
    accepted = sum(r.count(ACCEPTED) for r in rows)
    total = ", ".join(f"{n} {s}" for s, n in counts_of.items() if n)
    return "\n".join([*shown, f"{len(rows)} nodes: {total}; {accepted} accepted warnings are not shown"])
