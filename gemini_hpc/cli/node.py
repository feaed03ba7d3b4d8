"""The verb `node NODE`: the jobs on a node, whether a drain moves them, and whether they survive its loss."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.config import Settings, load_site_settings
from gemini_hpc.report.columns import align
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.query.inspect_document import Document

SCHEMA = 1
MAX_LOOKED_AT = 60  # the controller's limit of queries per user at once
_DRAIN = {"idle": "nothing: a spare", "leaves": "moves to a spare", "stays": "runs on here"}


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "node",
        run,
        "gemini-hpc node n3",
        "sudo gemini-hpc node n3 --json",
        help="list the jobs that a drain of a node would hurt",
        description="List the jobs on a node before it is drained: your own; for root, SlurmUser and operators all. "
        "IF DRAINED says what a drain does to the job, IF LOST what it resumes from if the node dies. "
        "Changes nothing.",
    )
    frame.add_node(parser)
    frame.add_json(parser)
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """List the jobs."""
    return frame.Result(collect_jobs(load_site_settings(args.config), args.node, clock.time()), render)


def collect_jobs(settings: Settings, node: str, now: float) -> Document:
    """Return the document of schema 1, to which keys are only ever added.

    Args:
        settings: The site's settings.
        node: Name of the node.
        now: The current Unix time.

    Raises:
        QueryError: The controller does not answer.
        SlurmError: Slurm does not answer, or does not know the node.
    """
    state, node_jobs, everybody = asyncio.run(_read_node(settings, node))
    visible_jobs = [(uid, job) for uid, job in node_jobs if everybody or uid == os.geteuid()]
    documents = _fetch_documents(settings, [job for _, job in visible_jobs[:MAX_LOOKED_AT]], now)
    return build_document(node, state, visible_jobs, documents, len(node_jobs) - len(visible_jobs), now)


async def _read_node(settings: Settings, node: str) -> tuple[str, list[tuple[int, int]], bool]:
    """Return Slurm's state of the node, its jobs as (uid, raw id), and whether the caller may see all of them."""
    from gemini_hpc.operators import Operators
    from gemini_hpc.slurm import Slurm

    slurm = Slurm()
    nodes = await slurm.read_nodes([node])
    node_jobs = sorted((await slurm.read_owners([node]))[node], key=lambda found: found[1])
    allowed = Operators(settings.operators, (0, *settings.list_slurm_uids()))
    return nodes[node].state_words, node_jobs, await allowed.allows(os.geteuid())


def _fetch_documents(settings: Settings, jobs: list[int], now: float) -> dict[int, Document]:
    """Return the inspect documents of those jobs that the controller knows."""
    from gemini_hpc.query import ask

    if not jobs:
        return {}
    try:
        with closing(ask.ControllerLine(settings, 0)) as line:
            return ask.fetch_documents(line, jobs, now)
    except (ask.NoControllerError, ask.QueryError) as exc:
        raise ask.QueryError(f"no controller ({exc}); {ask.WITHOUT_CONTROLLER}") from None


def build_document(
    node: str,
    state: str,
    jobs: list[tuple[int, int]],
    documents: Mapping[int, Document],
    others: int,
    now: float,
) -> Document:
    """Return the document.

    Args:
        node: Name of the node.
        state: Slurm's state of it.
        jobs: The jobs shown, as (uid, raw id).
        documents: Inspect documents by raw id; a job without one is not protected.
        others: Number of jobs on the node that the caller may not see.
        now: The current Unix time.
    """
    from gemini_hpc.query.drain import UNPROTECTED, predict_outlook
    from gemini_hpc.query.figures import find_user_name

    rows = []
    for uid, job in jobs:
        d = documents.get(job)
        known = d is not None and d["state"] not in ("unprotected", "ended")
        seen = predict_outlook(d, node) if d is not None and known else UNPROTECTED
        rows.append(
            {
                "job": job,
                "id": (d["slurm"].get("id") if d else "") or str(job),
                "uid": uid,
                "user": find_user_name(uid),
                "state": d["state"] if d else "unprotected",
                "drain": seen.drain,
                "survives": seen.survives,
                "resumes_from": seen.source or None,
                "step": seen.step or None,
                "why": seen.why,
            }
        )
    return {"schema": SCHEMA, "t": now, "node": node, "slurm": state, "jobs": rows, "not_shown": others}


def render(d: Document) -> str:
    """Return the document as text."""
    lines = [f"node {sanitize(d['node'])} is {sanitize(d['slurm'])}"]
    rows: list[tuple[str, ...]] = [("JOB", "USER", "STATE", "IF DRAINED", "IF LOST")]
    rows += [
        (sanitize(j["id"]), sanitize(j["user"]), sanitize(j["state"]), _DRAIN[j["drain"]], _describe_loss(j))
        for j in d["jobs"]
    ]
    lines += align(rows) if len(rows) > 1 else ["no job of yours runs there"]
    lines += [f"job {sanitize(j['id'])}: {sanitize(j['why'])}" for j in d["jobs"] if j["why"]]
    if moved := [sanitize(j["id"]) for j in d["jobs"] if j["drain"] == "stays" and j["survives"]]:
        lines.append(f"to move job {moved[0]} by a requeue: gemini-hpc requeue --after-save {moved[0]}")
    if d["not_shown"]:
        lines.append(f"and {d['not_shown']} job{'s' * (d['not_shown'] > 1)} of others")
    return "\n".join(lines)


def _describe_loss(job: Document) -> str:
    if job["drain"] == "idle":
        return "goes on"
    return f"step {job['step']} from {job['resumes_from']}" if job["survives"] else "begins anew or ends"
