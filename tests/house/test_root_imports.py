"""What root runs in a prolog or epilog needs nothing but Python: a package that is missing must not matter there."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
before = set(sys.modules)
import gemini_hpc.node.{name}
for module in sorted(set(sys.modules) - before):
    if module.partition(".")[0] not in sys.stdlib_module_names and not module.startswith("gemini_hpc"):
        print(module)
"""


@pytest.mark.parametrize("name", ["prolog", "epilog", "reaper"])
def test_nothing_but_the_standard_library(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
