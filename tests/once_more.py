"""`python -m tests.once_more PYTEST_EXIT_CODE`, after a run of the whole suite: what failed in it, once more, alone.

Three workers share two cores in `make test`, with clusters, trainings and kills in each. A test that names an instant
can fail there for lack of a processor; alone it must pass. So a few failures are no verdict yet: they are named, run
again one after the other with nothing beside them, and named again at the end. Many are one, and so is whatever else
pytest ends with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 8
ROOT = Path(__file__).resolve().parent.parent
FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
TESTS_FAILED = 1  # pytest's exit code


def main(code: int) -> int:
    """The exit code of the whole."""
    if code != TESTS_FAILED or not FAILED.exists():
        return code
    tests = sorted(json.loads(FAILED.read_text()))
    if not 0 < len(tests) <= MOST:
        return code
    print(f"\n{len(tests)} failed beside other workers; once more, alone:", *tests, sep="\n  ", flush=True)
    alone = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode
    if alone == 0:
        print("passed alone, and failed beside other workers (each is worth a look):", *tests, sep="\n  ", flush=True)
    return alone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
