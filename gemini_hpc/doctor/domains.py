"""Check that agents on this host would know the failure domains."""

from __future__ import annotations

import os
import stat

from gemini_hpc.agent.peers import failure_domains
from gemini_hpc.core.topology import TopologyError
from gemini_hpc.doctor.check import ON_NODE, Check
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, ok, warning, wrong


def known(facts: HostFacts) -> Outcome:
    """Check that the file exists, is readable for every job's owner, and names this node."""
    setting = facts.settings.failure_domains
    if setting == failure_domains.NONE:
        return ok('"none": nodes side by side hold each other\'s copies')
    path = failure_domains.path_of(setting)
    if not path:
        return ok(f"no {' and no '.join(failure_domains.SLURMS)}: nodes side by side hold each other's copies")
    wanted, fix = f"{path}, which says what fails together", 'see docs/admin.md, failure domains; or set it to "none"'
    try:
        found = failure_domains.read(setting)
        if not os.stat(path).st_mode & stat.S_IROTH:
            return wrong(f"{path} cannot be read by every job's owner", wanted, f"chmod o+r {path}")
    except OSError as error:
        return wrong(f"{path}: {error.strerror}", wanted, fix)
    except TopologyError as error:
        return wrong(str(error), wanted, fix)
    node = facts.own_node
    if node is not None and node.name not in found:
        return warning(f"{path} does not name {node.name}", f"all nodes named in {path}", fix)
    return ok(f"{path}: {len(found)} nodes in {len(set(found.values()))} domains")


CHECKS = (Check("files.domains", "failure domains", ON_NODE, known),)
