"""The findings as text for people, and as a JSON document for machines (schema 1, docs/json.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gemini_hpc import __version__
from gemini_hpc.doctor.examine import OTHER_HOSTS
from gemini_hpc.doctor.facts import Here
from gemini_hpc.doctor.finding import ACCEPTED, SKIPPED, STATUSES, WARNING, WRONG, Finding
from gemini_hpc.lines import replace_unprintable
from gemini_hpc.report.columns import USUAL, fold

SCHEMA = 1
Document = dict[str, Any]


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
