"""Reader of slurm.conf and its like as files, for programs that call no Slurm command."""

from __future__ import annotations

import os

from gemini_hpc.core import conf_text, hostlist
from gemini_hpc.files import read_regular_file

MAX_BYTES = 8 << 20
MAX_FILES = 32
_SPOOL = "/var/spool/slurmd"  # Slurm's default


def read_text(path: str) -> str:
    """Return the text of a file of Slurm with included files in their places.

    Raises:
        OSError: A file could not be read.
    """
    text: list[str] = []
    _add_lines(text, path, [path])
    return "\n".join(text)


def _add_lines(text: list[str], path: str, seen: list[str]) -> None:
    content = read_regular_file(path, MAX_BYTES).decode(errors="replace").replace("\0", "?")
    for _, line in conf_text.split_lines(content):
        word, *name = line.split(maxsplit=1)
        if word.lower() != "include" or not name:
            text.append(line)
            continue
        cluster = parse_values("\n".join(text)).get("clustername", "") if "%c" in name[0] else ""
        below = os.path.join(os.path.dirname(path), name[0].strip('"').replace("%c", cluster))
        if below not in seen and len(seen) < MAX_FILES:
            seen.append(below)
            _add_lines(text, below, seen)


def read_values(path: str) -> dict[str, str]:
    """Return the last value of each key of one of Slurm's files; keys are lower-cased.

    Raises:
        OSError: A file could not be read.
    """
    return parse_values(read_text(path))


def parse_pairs(text: str) -> list[tuple[str, str]]:
    """Return the pairs of key and value in the text of one of Slurm's files, in order; keys are lower-cased."""
    return [pair for _, line in conf_text.split_lines(text) for pair in conf_text.read_pairs(line)]


def parse_values(text: str) -> dict[str, str]:
    """Return the last value of each key in the text of one of Slurm's files; keys are lower-cased."""
    return dict(parse_pairs(text))


def find_spool(values: dict[str, str], node: str) -> str:
    """Return the directory of slurmd's spool on a node, by the values of slurm.conf."""
    return expand(values.get("slurmdspooldir", _SPOOL), node)


def expand(path: str, node: str) -> str:
    """Return a path with this host's name for %h and the node's for %n."""
    return path.replace("%n", node).replace("%h", os.uname().nodename.split(".")[0])


def find_nodes(text: str) -> list[str]:
    """Return the names by which slurm.conf may know this host: its own, then those of lines with NodeHostname."""
    full = os.uname().nodename
    host = full.split(".")[0]
    found = [host, full]
    for _, line in conf_text.split_lines(text):
        values = dict(conf_text.read_pairs(line))
        if "nodename" not in values or "nodehostname" not in values:
            continue
        try:
            nodes, hosts = (hostlist.expand(values[key]) for key in ("nodename", "nodehostname"))
        except ValueError:
            continue
        if len(hosts) == 1:  # several nodes on one host
            hosts *= len(nodes)
        found += [node for node, its in zip(nodes, hosts, strict=False) if its in (host, full)]
    return list(dict.fromkeys(found))
