"""`python -m tests.once_more PYTEST_EXIT_CODE`, after a run of the whole suite: what failed in it, once more, alone.

Three workers share two cores in `make test`, with clusters, trainings and kills in each. A test that names an instant
can fail there for lack of a processor. So a few failures are no verdict yet: they run again one after the other, with
nothing beside them. What fails alone, too, fails the run. So does what passes alone, unless tests/flakes.toml names
it: a race in the code itself looks just the same. Many failures are a verdict, and so is whatever else pytest ends
with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from tests import ledger

MOST = 8
FAILED = ledger.ROOT / ".pytest_cache/v/cache/lastfailed"
PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes

ADVICE = """
{tests}
failed beside other workers, passed alone, and {is_} not in tests/flakes.toml. Best: find out what the test waits for,
or what the code does too late under load, and mend that. A race in the code looks just like this, and an entry in
the ledger would hide the next one, too. So an entry is second best, for a test whose own timing is at fault:
{lines}"""


def run_alone(tests: Sequence[str]) -> int:
    """pytest's exit code. It leaves in FAILED what has failed again."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ledger.ROOT, check=False).returncode


def last_failed(path: Path) -> list[str]:
    return sorted(json.loads(path.read_text())) if path.exists() else []


def main(
    code: int,
    failed: Path = FAILED,
    book: Path = ledger.LEDGER,
    again: Callable[[Sequence[str]], int] = run_alone,
) -> int:
    """The exit code of the whole: 0 if all that failed is known to be flaky, and passes alone."""
    tests = last_failed(failed)
    if code != TESTS_FAILED or not 0 < len(tests) <= MOST:
        return code
    print(f"\n{len(tests)} failed beside other workers; once more, alone:", *tests, sep="\n  ", flush=True)
    alone = again(tests)
    if alone not in (PASSED, TESTS_FAILED):
        return alone
    still = set(tests).intersection(last_failed(failed)) if alone == TESTS_FAILED else set()
    passed = [test for test in tests if test not in still]
    try:
        unknown = ledger.missing(passed, ledger.read(book))
    except ledger.LedgerError as exc:
        print(f"\nonce more: FAILED: {exc}", flush=True)
        return TESTS_FAILED
    if known := [test for test in passed if test not in unknown]:
        print("\npassed alone, known to be flaky beside others:", *known, sep="\n  ")
    if unknown:
        lines = dict.fromkeys(f"    {ledger.line_for(test, date.today())}" for test in unknown)
        shown = "\n".join(f"  {test}" for test in unknown)
        print(ADVICE.format(tests=shown, is_="is" if len(unknown) == 1 else "are", lines="\n".join(lines)))
    red = alone == TESTS_FAILED or bool(unknown)
    print(
        f"\nonce more: {len(tests)} failed beside others; alone {len(still)} failed and {len(passed)} passed, "
        f"{len(unknown)} of them not in tests/flakes.toml: {'FAILED' if red else 'passed'}",
        flush=True,
    )
    return TESTS_FAILED if red else PASSED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
