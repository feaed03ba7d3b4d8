"""The table of all checks, run in sequence in bounded time, and their findings as text and as a JSON document.

A check that breaks or hangs never stops the others. The document has schema 1 (docs/json.md).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gemini_hpc import __version__, clock
from gemini_hpc.doctor import controller, files, installation, jobs, leftovers, memory, munge, network, plugin, slurm
from gemini_hpc.doctor.facts import CONTROLLER, LOGIN, NODE, Here, HostFacts
from gemini_hpc.doctor.finding import (
    ACCEPTED,
    SKIPPED,
    STATUSES,
    WARNING,
    WRONG,
    Finding,
    Outcome,
    Unavailable,
    read_or,
)
from gemini_hpc.lines import replace_unprintable
from gemini_hpc.report.columns import USUAL, fold

ANYWHERE = frozenset((CONTROLLER, NODE, LOGIN))
ON_SERVERS = frozenset((NODE, CONTROLLER))
ON_NODE = frozenset((NODE,))
ON_CONTROLLER = frozenset((CONTROLLER,))


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the doctor.

    `look` may raise `Unavailable`, which skips the check. Any other exception makes only this check `wrong`.
    """

    name: str
    rule: str
    roles: frozenset[str]
    look: Callable[[HostFacts], Outcome]


CHECKS = (
    Check("install.parts", "installation", ANYWHERE, installation.check_parts),
    Check("slurm.answers", "prove-death", ANYWHERE, slurm.check_answers),
    Check("slurm.prolog-flags", "memory", ANYWHERE, slurm.check_prolog_flags),
    Check("slurm.user", "one-controller", ANYWHERE, slurm.check_user),
    Check("slurm.cluster-name", "believe-slurm", ANYWHERE, slurm.check_cluster_name),
    Check("slurm.cred-expire", "slurms-own-timers", ANYWHERE, slurm.check_cred_expire),
    Check("slurm.job-requeue", "requeue", ANYWHERE, slurm.check_job_requeue),
    Check("slurm.unkillable", "administrators-resume", ANYWHERE, slurm.check_unkillable),
    Check("slurm.return-to-service", "administrators-resume", ANYWHERE, slurm.check_return_to_service),
    Check("slurm.prolog-failures", "users-errors", ANYWHERE, slurm.check_prolog_failures),
    Check("slurm.prolog-timeout", "users-errors", ANYWHERE, slurm.check_prolog_timeout),
    Check("slurm.proctrack", "survivors-raise-first", ANYWHERE, slurm.check_proctrack),
    Check("slurm.over-memory-kill", "not-a-failure", ANYWHERE, slurm.check_over_memory_kill),
    Check("slurm.job-container", "private directories", ANYWHERE, slurm.check_job_container),
    Check("slurm.expedited-requeue", "slurms-own-timers", ANYWHERE, slurm.check_expedited_requeue),
    Check("slurm.boot", "administrators-resume", ON_NODE, memory.check_boot_unit),
    Check("slurm.detection", "prove-death", ANYWHERE, slurm.check_detection),
    Check("scripts.prolog", "users-errors", ANYWHERE, installation.check_prolog),
    Check("scripts.epilog", "give-way", ANYWHERE, installation.check_epilog),
    Check("scripts.clean-up", "memory", ANYWHERE, installation.check_clean_up),
    Check("plugin.line", "plugin-loaded", ANYWHERE, plugin.check_line),
    Check("plugin.release", "plugin-loaded", ANYWHERE, plugin.check_release),
    Check("plugin.run-dir", "plugin-loaded", ANYWHERE, plugin.check_run_dir),
    Check("files.settings", files.CVE, ANYWHERE, files.check_settings),
    Check("files.scripts", files.CVE, ANYWHERE, files.check_scripts),
    Check("files.plugin", files.CVE, ANYWHERE, files.check_plugin),
    Check("files.python", files.CVE, ANYWHERE, files.check_python),
    Check("files.version", "not-a-failure", ANYWHERE, files.check_version),
    Check("files.tier", "hold-only-after-a-death", ON_NODE, files.check_tier),
    Check("files.run-dir", "CVE-2023-41914", ON_NODE, files.check_run_dir),
    Check("files.state-dir", "believe-slurm", ON_CONTROLLER, files.check_state_dir),
    Check("files.domains", "failure domains", ON_NODE, files.check_domains),
    Check("files.access", "installation", ANYWHERE, files.check_access),
    Check("munge.answers", "believe-slurm", ANYWHERE, munge.check_answers),
    Check("munge.version", "CVE-2026-25506", ANYWHERE, munge.check_version),
    Check("munge.clock", "believe-slurm", ANYWHERE, munge.check_clock),
    Check("munge.key", "CVE-2026-25506", ANYWHERE, munge.check_key),
    Check("auth.key", "CVE-2026-25506", ANYWHERE, munge.check_site_key),
    Check("network.controller", "prove-death", ANYWHERE, network.check_controller),
    Check("network.slurm-ports", "all-or-nothing-map", ANYWHERE, network.check_slurm_ports),
    Check("network.ephemeral", "all-or-nothing-map", ON_SERVERS, network.check_ephemeral),
    Check("network.in-use", "all-or-nothing-map", ON_SERVERS, network.check_in_use),
    Check("network.addresses", "prove-death", ON_NODE, network.check_addresses),
    Check("network.rdma", "", ON_NODE, network.check_rdma),
    Check("memory.carve-out", "memory", ON_NODE, memory.check_carve_out),
    Check("memory.slurmd-cgroup", "memory", ON_NODE, memory.check_slurmd_cgroup),
    Check("memory.unit", "memory", ON_NODE, memory.check_unit),
    Check("controller.runs", "one-controller", ON_CONTROLLER, controller.check_service),
    Check("controller.journal", "one-controller", ON_CONTROLLER, controller.check_journal),
    Check("controller.alerts", "", ON_CONTROLLER, controller.check_alerts),
    Check("controller.lemons", "", ON_CONTROLLER, controller.check_lemons),
    Check("controller.mode", "", ON_CONTROLLER, controller.check_mode),
    Check("controller.primary", "one-controller", ON_CONTROLLER, controller.check_primary),
    Check("controller.lock", "one-controller", ON_CONTROLLER, controller.check_lock),
    Check("controller.slurm-api", "asking Slurm", ON_CONTROLLER, controller.check_slurm_api),
    Check("jobs.agents", "plugin-loaded", ANYWHERE, jobs.check_agents),
    Check("jobs.requeue", "requeue", ANYWHERE, jobs.check_requeue),
    Check("jobs.tasks", "plugin-loaded", ON_NODE, jobs.check_tasks),
    Check("agents.strangers", "least rights", ON_NODE, jobs.check_strangers),
    Check("agents.room", "full directories", ON_NODE, jobs.check_room),
    Check("leftovers.reservations", "reservations", ANYWHERE, leftovers.check_reservations),
    Check("leftovers.nodes", "administrators-resume", ANYWHERE, leftovers.check_nodes),
    Check("leftovers.pins", "pins", ON_CONTROLLER, leftovers.check_pins),
    Check("leftovers.directories", "give-way", ON_NODE, leftovers.check_directories),
    Check("leftovers.canary", "", ANYWHERE, leftovers.check_canary),
)
CHECK_TIMEOUT_S = 20.0  # the slowest check dials several hosts
ALL_TIMEOUT_S = 90.0  # an administrator waits; checks left over are named
OTHER_HOSTS = "not for this kind of host"
SCHEMA = 1
Document = dict[str, Any]


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
        answer.append(Outcome(WRONG, text[:400], "a file that can be read", "check whether the file should be there"))
    except Exception as exc:
        text = f"this check broke: {type(exc).__name__}: {exc}"
        answer.append(
            Outcome(WRONG, text[:400], "an answer", "please report this line to the developers of gemini-hpc")
        )


def _run_bounded(check: Check, facts: HostFacts, timeout_s: float) -> Outcome:
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
    roles = _find_roles(facts)
    accepted: tuple[str, ...] = read_or((), lambda: facts.settings.accepted_warnings)
    for check in checks:
        if only and check.name not in only and check.name.partition(".")[0] not in only:
            continue
        began = clock.monotonic()
        if not check.roles & roles:
            outcome = Outcome(SKIPPED, f"{OTHER_HOSTS} ({', '.join(sorted(roles))})")
        elif began >= end:
            outcome = Outcome(SKIPPED, f"no time left after {ALL_TIMEOUT_S:.0f} s")
        else:
            outcome = _run_bounded(check, facts, min(CHECK_TIMEOUT_S, end - began))
        if outcome.status == WARNING and check.name in accepted:
            outcome = replace(outcome, status=ACCEPTED)
        took = round(clock.monotonic() - began, 3)
        yield Finding(check.name, check.rule, outcome.status, outcome.found, outcome.wanted, outcome.fix, took)


def _find_roles(facts: HostFacts) -> frozenset[str]:
    found: list[frozenset[str]] = []
    thread = threading.Thread(target=lambda: found.append(facts.roles), daemon=True)
    thread.start()
    thread.join(CHECK_TIMEOUT_S)
    return found[0] if found else frozenset(("login",))


def build_document(
    findings: Sequence[Finding], own_host: Here, roles: Sequence[str], user: str, slurm: str, status: int, now: float
) -> Document:
    """Return the document of schema 1, to which keys are only ever added. `status` is the exit status."""
    counts = Counter(f.status for f in findings)
    return {
        "schema": SCHEMA,
        "t": now,
        "host": own_host.host,
        "roles": list(roles),
        "user": user,
        "version": __version__,
        "slurm": slurm,
        "settings_sha256": own_host.settings_sha256,
        "agents": own_host.agents,
        "status": status,
        "counts": {word: counts[word] for word in STATUSES},
        "checks": [asdict(f) for f in findings],
    }


def sanitize_text(text: str) -> str:
    """Return text with unprintable characters replaced.

    Paths, reasons and names partly come from other users, and the output appears on root's terminal.
    """
    return replace_unprintable(" ".join(text.split()))


def format_document(d: Document, columns: int = USUAL) -> str:
    """Return each check with its finding, and for faults the wanted state and the remedy.

    Checks that are skipped for the same reason share one entry.
    """
    shown = [c for c in d["checks"] if not (c["status"] == SKIPPED and c["found"].startswith(OTHER_HOSTS))]
    reasons: dict[str, list[str]] = {}
    for c in shown:
        if c["status"] == SKIPPED:
            reasons.setdefault(c["found"], []).append(c["check"])
    name_width = max((len(c["check"]) for c in shown if c["status"] != ACCEPTED), default=0)
    lines = []
    for c in shown:
        if c["status"] == ACCEPTED:
            continue
        word = c["status"].upper() if c["status"] == WRONG else c["status"]
        names = reasons.pop(c["found"], []) if c["status"] == SKIPPED else [c["check"]]
        if not names:
            continue
        name = f"{names[0]:<{name_width}}  " if len(names) == 1 else f"{', '.join(names)}: "
        lines += fold(name + sanitize_text(c["found"]), columns, " " * 11, f"{word:<8} ")
        if c["status"] in (WARNING, WRONG):
            lines += fold(sanitize_text(c["wanted"]), columns, " " * 19, f"{'':<11}wanted: ")
            lines += fold(sanitize_text(c["fix"]), columns, " " * 19, f"{'':<11}fix:    ")
    counts = Counter(c["status"] for c in shown)
    elsewhere = len(d["checks"]) - len(shown)
    summary = ", ".join(f"{counts[word]} {word}" for word in STATUSES)
    others = f"; {elsewhere} are for other hosts" if elsewhere else ""
    who = f"{d['host']} ({', '.join(d['roles'])}), as {d['user']}, Slurm {d['slurm'] or 'unknown'}"
    return "\n".join([*lines, *fold(f"{who}: {len(shown)} checks: {summary}{others}", columns)])
