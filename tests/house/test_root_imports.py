"""What root runs in a prolog or epilog needs nothing but Python: a package that is missing must not matter there."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
before = set(sys.modules)
from gemini_hpc.node import epilog, prolog, reaper
for module in sorted(set(sys.modules) - before):
    if module.partition(".")[0] not in sys.stdlib_module_names and not module.startswith("gemini_hpc"):
        print(module)
"""


def test_nothing_but_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""


AGENT = """
import sys
sys.modules.update(dict.fromkeys(("ssl", "_ssl", "_hashlib")))
import gemini_hpc.agent.__main__, gemini_hpc.agent.daemon, gemini_hpc.agent.tier.worker_process
print(*sorted({"shutil", "tempfile", "bz2", "lzma", "zlib", "numpy", "torch", "h5py"} & set(sys.modules)))
"""


def test_an_agent_imports_what_it_uses() -> None:
    """Each node has one for each job, and what it imports is most of its memory."""
    done = subprocess.run([sys.executable, "-c", AGENT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
