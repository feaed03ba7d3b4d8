"""The quick check, `pytest --quick`, which `make check` runs: what an ordinary user's machine can tell in a minute.

A test is in it by default. What needs root, a cluster or another program that may not be there is skipped at the very
call that needs it (`guard`). What takes longer than BUDGET_S is told at the end of the run, and belongs into LATER.
Campaigns run a tenth of their examples (`part`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gemini_hpc.devcluster.cluster import Cluster

TESTS = Path(__file__).resolve().parent
BUDGET_S = 3.0
PART = 10

# Below tests/: directories, files or tests that `make test` runs only, and why. Directories and files that need root
# or a cluster stand here to save their import; they would be skipped anyway.
LATER = {
    "devcluster": "clusters",
    "e2e": "clusters",
    "hostile": "clusters",
    "memory": "clusters",
    "recovery": "clusters",
    "node": "mount namespaces",
    "spank": "Slurm's headers",
    "mpi": "MPI",
    "examples": "mount namespaces, other training stacks",
    "integrations": "other training stacks",
    "releases": "roots of other releases",
    "leaks": "what only root can leave behind",
    "cli/test_run.py": "processes that wait",
    "controller/test_last_judgement.py": "time",
    "launch/test_restarts.py": "trainings, agents",
    "launch/test_stacks.py": "other training stacks, agents",
    "report/test_report.py": "drawings",
    "doctor/test_broken_hosts.py": "mount namespaces, other users",
    # Processes for each of many tests.
    "agent/test_local_bad_input.py": "time",
    "agent/test_push_bad_input.py": "time",
    "tier/test_direct.py": "time",
    "tier/test_names.py": "time",
    "tier/test_worker.py": "time",
    "train/test_faults.py": "trainings",
    "train/test_gpu_benchmark.py": "trainings",
    "train/test_hangs.py": "trainings, agents",
    "train/test_host.py": "trainings",
    "train/test_keep.py": "trainings, agents",
    "train/test_kept_profiles.py": "trainings",
    "train/test_killed_in_the_optimizer.py": "trainings, agents",
    "train/test_kills.py": "trainings",
    "train/test_mpi.py": "MPI",
    "train/test_nccl_checkpointer.py": "trainings",
    "train/test_nccl_library.py": "a C compiler",
    "train/test_parallel.py": "trainings, agents",
    "train/test_reject.py": "trainings, agents",
    "train/test_replica.py": "trainings",
    "train/test_rescue.py": "trainings, agents",
    "train/test_resume.py": "trainings",
    "train/test_traffic.py": "trainings",
    "train/test_transport.py": "trainings, MPI",
    # Longer than BUDGET_S.
    "agent/test_save_rules.py::test_in_every_order_of_events_all_are_answered_and_let_go": "time",
    "agent/test_salvage_rules.py::test_in_every_order_of_events_it_ends_and_nobody_is_told_too_early": "time",
    "agent/test_workers.py::test_too_many_at_once_are_refused": "time",
    "controller/test_fencing.py::test_every_combination_of_what_is_seen": "time",
    "core/test_commit_exhaustive.py::test_awaited_before_the_write_two_steps_can_be_repeated[job1]": "time",
    "core/test_commit_exhaustive.py::test_waits_that_run_out_lose_nothing_and_block_nothing": "time",
    "core/test_commit_exhaustive.py::test_skipped_versions_block_nobody_for_ever[True]": "time",
    "sim/test_campaign.py::test_what_is_broken_in_jobs_with_live_replicas_is_found": "time",
    "sim/test_campaign.py::test_what_is_broken_on_purpose_is_found": "time",
    "sim/test_site.py::test_a_seed_repeats_a_run_to_the_letter": "time",
    "sim/test_site.py::test_nothing_goes_wrong[backup]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[cut-off]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[hangs]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[no-controller]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[reboot]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[slurmctld-killed]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[success]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[survivor-cut]": "time",
    "sim/test_site.py::test_nothing_goes_wrong[outage]": "time",
    "sim/test_site.py::test_the_mix_comes_to_what_is_broken_by_itself": "time",
    "sim/test_site.py::test_what_is_broken_on_purpose_is_found": "time",
    "sim/test_tier.py::test_a_seed_repeats_a_run_to_the_letter": "time",
    "sim/test_tier.py::test_nothing_goes_wrong[comes_back]": "time",
    "sim/test_tier.py::test_nothing_goes_wrong[ends_again]": "time",
    "sim/test_tier.py::test_nothing_goes_wrong[kept]": "time",
    "sim/test_tier.py::test_nothing_goes_wrong[rejected]": "time",
    "sim/test_tier.py::test_nothing_goes_wrong[succeeds]": "time",
    "sim/test_tier.py::test_what_is_broken_on_purpose_is_found": "time",
    "tier/test_nodefile.py::test_shards_of_many_sizes_come_back_when_they_are_read_ahead": "time",
    "train/test_kinds.py::test_a_value_that_cannot_be_captured_trains_unprotected": "time",
    "train/test_kinds.py::test_state_that_appears_and_cannot_be_captured_ends_protection": "time",
    "train/test_kinds.py::test_what_cannot_be_captured_trains_unprotected": "time",
}
# Programs that need root, or Debian packages that the quick check does without.
PROGRAMS = {
    *("unshare", "nsenter", "setpriv", "mount", "umount", "ip", "debootstrap"),
    *("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "srun", "mariadbd"),
    *("gcc", "cc", "make", "mpiexec", "mpirun", "strace"),
}
# Where only root makes files.
ROOTS = ("/etc/", "/opt/gemini", "/sys/", "/var/lib/gemini")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# From it the tests' trainings are forked: seconds each, and more on a busy machine.
TRAININGS = "zygote.py"

_on = False


def begin() -> None:
    """Called once, before any test is imported."""
    global _on  # noqa: PLW0603
    _on = True
    sys.addaudithook(guard)
    Cluster.up = _no_cluster  # type: ignore[method-assign]


def part(count: int) -> int:
    """How many examples or seeds of a campaign to run: all, or some in the quick check."""
    return max(1, count // PART) if _on else count


def later(path: str) -> str:
    """Why the quick check leaves out `path`: a directory, file or test, as pytest's ids have it. "": it does not."""
    test = path.removeprefix(f"{TESTS.name}/")
    every = test.partition("[")[0]
    for name, why in LATER.items():
        if name in (test, every) or every.startswith((f"{name}/", f"{name}::")):
            return why
    return ""


def guard(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: skips the test that is about to do what needs root, such a program, or much time."""
    if event == "subprocess.Popen":
        path, words, _, environment = arguments
        program = os.path.basename(os.fsdecode(path))
        if program in PROGRAMS and not _stand_in(os.fsdecode(path), environment):
            pytest.skip(f"the quick check starts no {program}")
        if not isinstance(words, str) and any(os.path.basename(os.fsdecode(word)) == TRAININGS for word in words):
            pytest.skip("the quick check starts no training")
    elif event == "os.chown" and not {arguments[1], arguments[2]} <= {-1, os.geteuid(), os.getegid()}:
        pytest.skip("the quick check gives no file to another user")
    elif (event == "os.mkdir" or (event == "open" and arguments[2] & WRITES)) and str(arguments[0]).startswith(ROOTS):
        pytest.skip(f"the quick check makes no {arguments[0]}")


def _stand_in(program: str, environment: Any) -> bool:
    """Whether this is a program of the test's own, by its path or by the first of that name in PATH."""
    found = shutil.which(program, path=(os.environ if environment is None else environment).get("PATH"))
    return found is not None and not found.startswith(("/usr/", "/bin/", "/sbin/"))


def _no_cluster(*_: object, **__: object) -> NoReturn:
    pytest.skip("the quick check starts no cluster")


def over_budget(durations: Iterable[tuple[str, float]]) -> list[str]:
    """Lines that name the tests which took too long, from the time of each of their phases."""
    total: dict[str, float] = defaultdict(float)
    for test, duration_s in durations:
        total[test] += duration_s
    slow = sorted((test for test in total if total[test] > BUDGET_S), key=lambda test: -total[test])
    if not slow:
        return [f"no test took longer than {BUDGET_S:g} s"]
    return [
        f"longer than {BUDGET_S:g} s: make it quicker, or name it in LATER in tests/quick.py (a busy machine, or the "
        "first test of a file, takes longer):",
        *(f"{total[test]:6.1f} s  {test}" for test in slow),
    ]


def skipped(reasons: Iterable[str]) -> list[str]:
    """Lines that count the tests by why they were skipped."""
    return [f"skipped: {count} {why.removeprefix('Skipped: ')}" for why, count in Counter(reasons).most_common()]
