"""The verb `jobs`: list the protected jobs with state, newest sealed version and survivable losses."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import parse_span
from gemini_hpc.config import Settings, load_site_settings
from gemini_hpc.durations import format_age
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.query.inspect_document import Document
    from gemini_hpc.wire.inspect_schema import JobRow

SCHEMA = 1
DAY_S = 86400.0  # without more words the controller lists jobs that ended within a day
MAX_LOOKED_AT = 60  # number of live jobs to query: the controller's limit of queries per user at once
HEAD = ("JOB", "USER", "STATE", "SLURM", "NODES", "STEP", "AGE", "SURVIVES", "REC")
WIDEST = (9, 8, 16, 9, 5, 6, 8, 8, 3)  # column widths; with the blanks between them 80 columns


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "jobs",
        run,
        "gemini-hpc jobs",
        "gemini-hpc jobs --since 3d --json",
        help="list the protected jobs, one line each",
        description="List protected jobs: your own; for root, SlurmUser and operators all. "
        "STATE is what gemini-hpc inspect says of the job, STEP its newest sealed step, AGE how old that is (of a "
        "job that has ended: how long ago it ended), SURVIVES how many nodes may be lost, whichever they are, REC "
        "how often the job came back after a lost node. Asks the controller.",
    )
    parser.add_argument(
        "--since",
        type=parse_span,
        default=DAY_S,
        metavar="AGE",
        help="also jobs that ended within AGE, such as 90m, 8h or 3d (default: 1d; 14d are remembered)",
    )
    frame.add_json(parser)
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """List the jobs."""
    return frame.Result(collect_jobs(load_site_settings(args.config), since_s=args.since, now=clock.time()), render)


def collect_jobs(settings: Settings, *, since_s: float, now: float) -> Document:
    """Return the document of schema 1, to which keys are only ever added.

    Args:
        settings: The site's settings.
        since_s: Jobs that ended longer ago are left out, in seconds.
        now: The current Unix time.

    Raises:
        QueryError: The controller does not answer, or refuses.
    """
    from gemini_hpc.query import ask

    try:
        with closing(ask.ControllerLine(settings, 0)) as line:
            answer = line.list_jobs(since_s > DAY_S)
            live = [row.job for row in answer.jobs if not row.ended][:MAX_LOOKED_AT]
            documents = ask.fetch_documents(line, live, now)  # without jobs that ended since the list was made
    except ask.NoControllerError as exc:
        raise ask.QueryError(f"no controller ({exc}); {ask.WITHOUT_CONTROLLER}") from None
    shown = (row for row in answer.jobs if not row.ended or row.ended >= now - since_s)
    rows = [_build_row(row, documents.get(row.job)) for row in sorted(shown, key=lambda row: row.job)]
    return {"schema": SCHEMA, "t": now, "jobs": rows, "not_shown": answer.more}


def _build_row(row: JobRow, d: Document | None) -> Document:
    from gemini_hpc.query import figures
    from gemini_hpc.query.inspect_document import format_protected_count

    slurm = d["slurm"].get("state", row.slurm) if d else row.slurm
    return {
        "job": row.job,
        "id": (d["slurm"].get("id") if d else "") or row.id or str(row.job),
        "uid": row.uid,
        "user": figures.find_user_name(row.uid),
        "state": d["state"] if d else "ended" if row.ended else "unknown",
        "state_of": format_protected_count(d) if d else "",
        "slurm": slurm,
        "nodes": len([n for n in d["nodes"] if n["member"]]) if d and d["nodes"] else row.nodes,
        "sealed_age_s": figures.compute_sealed_age_s(d) if d else None,
        "sealed_version": (figures.find_sealed_version(d) if d else None) or row.sealed,
        "survives": figures.count_survivable_nodes(d) if d else None,
        "recoveries": sum(r["completed"] for r in d["recoveries"]) if d else row.recoveries,
        "restarts": row.restarts,
        "ended": row.ended or None,
    }


def render(d: Document) -> str:
    """Return the document as a table of at most 80 columns."""
    rows: list[tuple[str, ...]] = [HEAD]
    for j in d["jobs"]:
        # An ended job has no copies left: show how long ago it ended.
        age = format_age(d["t"] - j["ended"] if j["ended"] else j["sealed_age_s"])
        step, nodes = str(j["sealed_version"] or "-"), str(j["nodes"] or "-")
        survives = "-" if j["survives"] is None else f"{j['survives']} node{'' if j['survives'] == 1 else 's'}"
        texts = (j["id"], j["user"], j["state"], j["slurm"], nodes, step, age, survives, str(j["recoveries"]))
        rows.append(tuple(sanitize(text) for text in texts))
        if j["state_of"]:
            rows.append(("", "", j["state_of"].replace(" trainings", ""), "", "", "", "", "", ""))
    widths = [min(limit, max(len(row[i]) for row in rows)) for i, limit in enumerate(WIDEST)]
    lines = [" ".join(_fit_cell(c, w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(rows) == 1:
        lines = ["no protected jobs of yours, as far as the controller remembers"]
    if d["not_shown"]:
        lines.append(f"and {d['not_shown']} older ones")
    return "\n".join(lines)


def _fit_cell(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "+"
