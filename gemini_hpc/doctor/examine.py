"""The list of all checks, run in sequence in bounded time; a check that breaks or hangs never stops the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace

from gemini_hpc import clock
from gemini_hpc.doctor import (
    access,
    agents,
    controller,
    domains,
    files,
    installation,
    jobs,
    leftovers,
    memory,
    munge,
    network,
    plugin,
    scripts,
    slurm,
)
from gemini_hpc.doctor.check import Check
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import ACCEPTED, SKIPPED, WARNING, WRONG, Finding, Outcome, Unavailable

CHECKS: tuple[Check, ...] = (
    *installation.CHECKS,
    *slurm.CHECKS,
    *scripts.CHECKS,
    *plugin.CHECKS,
    *files.CHECKS,
    *domains.CHECKS,
    *access.CHECKS,
    *munge.CHECKS,
    *network.CHECKS,
    *memory.CHECKS,
    *controller.CHECKS,
    *jobs.CHECKS,
    *agents.CHECKS,
    *leftovers.CHECKS,
)
CHECK_TIMEOUT_S = 20.0
ALL_TIMEOUT_S = 90.0
OTHER_HOSTS = "not for this kind of host"


def _run_check(check: Check, facts: HostFacts, answer: list[Outcome]) -> None:
    try:
        answer.append(check.look(facts))
    except Unavailable as exc:
        answer.append(Outcome(SKIPPED, str(exc)))
    except PermissionError as exc:
        answer.append(Outcome(SKIPPED, f"{exc.filename or ''}: {exc.strerror}; run it again as root"))
    except OSError as exc:
        what = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, str | bytes) else ""
        text = f"{what}{exc.strerror or exc}"
        answer.append(
            Outcome(WRONG, text[:400], "a file that can be looked at", "check whether the file should be there")
        )
    except Exception as exc:
        text = f"this check broke: {type(exc).__name__}: {exc}"
        answer.append(
            Outcome(WRONG, text[:400], "an answer", "please report this line to the developers of gemini-hpc")
        )


def _bounded(check: Check, facts: HostFacts, timeout_s: float) -> Outcome:
    answer: list[Outcome] = []
    # A thread, since a hanging file system cannot be interrupted. A daemon, so that it does not hold up the
    # process's end.
    thread = threading.Thread(target=_run_check, args=(check, facts, answer), name=check.name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if answer:
        return answer[0]
    fix = "look for a hung file system, name service or daemon on this host"
    return Outcome(WRONG, f"no answer within {timeout_s:.0f} s", "an answer", fix)


def examine(facts: HostFacts, only: Collection[str] = (), checks: tuple[Check, ...] = CHECKS) -> Iterator[Finding]:
    """Yield the findings, in the order of the checks.

    `only` restricts the checks to these names or groups (the part of a name before the dot).
    """
    end = clock.monotonic() + ALL_TIMEOUT_S
    roles, accepted = _roles(facts), _accepted(facts)
    for check in checks:
        if only and check.name not in only and check.name.partition(".")[0] not in only:
            continue
        began = clock.monotonic()
        if not check.roles & roles:
            outcome = Outcome(SKIPPED, f"{OTHER_HOSTS} ({', '.join(sorted(roles))})")
        elif began >= end:
            outcome = Outcome(SKIPPED, f"no time left after {ALL_TIMEOUT_S:.0f} s")
        else:
            outcome = _bounded(check, facts, min(CHECK_TIMEOUT_S, end - began))
        if outcome.status == WARNING and check.name in accepted:
            outcome = replace(outcome, status=ACCEPTED)
        took = round(clock.monotonic() - began, 3)
        yield Finding(check.name, check.rule, outcome.status, outcome.found, outcome.wanted, outcome.fix, took)


def _accepted(facts: HostFacts) -> tuple[str, ...]:
    try:
        return facts.settings.accepted_warnings
    except Unavailable:
        return ()


def _roles(facts: HostFacts) -> frozenset[str]:
    found: list[frozenset[str]] = []
    thread = threading.Thread(target=lambda: found.append(facts.roles), daemon=True)
    thread.start()
    thread.join(CHECK_TIMEOUT_S)
    return found[0] if found else frozenset(("login",))
