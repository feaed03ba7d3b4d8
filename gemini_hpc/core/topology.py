r"""The failure domain of each node, as a file describes it: a site's own list, or Slurm's topology.

Three kinds of lines, also mixed; "#" begins a comment, "\" at the end of a line continues it:

    n[1-32]  rack1                                 nodes, and the name or path of their domain
    SwitchName=leaf1 Nodes=n[1-32]                 topology/tree: topology.conf, or `scontrol show topology`
    SwitchName=spine Switches=leaf[1-8]
    BlockName=b1 Nodes=n[1-18]                     topology/block

A switch with other switches below is a wider domain: "spine.leaf1".
"""

from __future__ import annotations

import re

from gemini_hpc.core import conf_text, hostlist
from gemini_hpc.core.domains import MAX_LEVELS, MAX_PATH

MAX_BYTES = 16 << 20  # largest file
MAX_NODES = 1 << 20

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_PATH}}}")
_KEYS = ("switchname", "blockname")


class TopologyError(ValueError):
    """Raised if the text cannot be used. The message names the line, what was wanted and what was found."""


def parse(text: str) -> dict[str, str]:
    """Return the domains by node, in the order of the text. The first mention of a node counts.

    Raises:
        TopologyError: The text cannot be used.
    """
    if len(text) > MAX_BYTES:
        raise TopologyError(f"{len(text)} characters: wanted at most {MAX_BYTES}")
    nodes: dict[str, str] = {}
    above: dict[str, str] = {}
    for number, line in conf_text.split_lines(text):
        words = line.split()
        try:
            if "=" in words[0]:
                _add_slurm_line(dict(conf_text.read_pairs(line)), nodes, above)
            elif len(words) == 2:
                _put(nodes, words[0], _check_name(words[1]))
            else:
                raise ValueError(f"wanted NODES DOMAIN, or SwitchName=... Nodes=..., found {line[:80]!r}")
        except ValueError as error:
            raise TopologyError(f"line {number}: {error}") from None
        if len(nodes) > MAX_NODES:
            raise TopologyError(f"line {number}: more than {MAX_NODES} nodes")
    paths: dict[str, str] = {}
    return {node: paths.setdefault(name, _build_path(name, above)) for node, name in nodes.items()}


def _add_slurm_line(values: dict[str, str], nodes: dict[str, str], above: dict[str, str]) -> None:
    key = next((key for key in _KEYS if key in values), None)
    if key is None:
        return  # BlockSizes=..., and any key that Slurm may add
    name = _check_name(values[key])
    if below := values.get("switches"):  # `scontrol show topology` repeats the nodes below
        for switch in _expand_hosts(below):
            above.setdefault(switch, name)
    elif within := values.get("nodes"):
        _put(nodes, within, name)


def _put(nodes: dict[str, str], within: str, name: str) -> None:
    for node in _expand_hosts(within):
        nodes.setdefault(node, name)


def _expand_hosts(text: str) -> list[str]:
    return [] if text == "(null)" else hostlist.expand(text, MAX_NODES)


def _check_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"wanted a name of letters, digits, '.', '_' and '-', found {text[:80]!r}")
    return text


def _build_path(name: str, above: dict[str, str]) -> str:
    """Return the name with the switches above it. A cycle ends the path."""
    path = [name]
    while (wider := above.get(path[0])) is not None and wider not in path and len(path) < MAX_LEVELS:
        path.insert(0, wider)
    return ".".join(path)[-MAX_PATH:]
