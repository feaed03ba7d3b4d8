"""The verb `report JOBID`: draw a job's saved steps over time, one iteration's traffic, and the overhead."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import build_count_parser
from gemini_hpc.cli.frame import UserError
from gemini_hpc.config import Settings
from gemini_hpc.core.numbers import MAX_RANKS, TRAINING_NAME

if TYPE_CHECKING:
    from gemini_hpc.report.report_data import Shown


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "report",
        run,
        "gemini-hpc report 42",
        "gemini-hpc report 42 --rank 3 -o pictures/",
        help="draw a job's saved steps and what they cost, as PNG and as one HTML page",
        description="Draw the saved steps of a running job over time, with lost nodes and resumes, and the age of "
        "the newest save. Then draw what the ranks have recorded of their checkpoints' traffic: one iteration (the "
        "training's collectives, idle spans, chunks, copies, waits at the optimizer) and the overhead over time. "
        "Writes PNG files and one self-contained HTML page, and prints their names. Asks Slurm for the job's "
        "nodes and the agents on them; only the job's owner and operators are answered. Drawing needs matplotlib.",
    )
    frame.add_job(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="prefix of the file names, or an existing directory (default: gemini-JOBID)",
    )
    parser.add_argument(
        "--rank",
        metavar="R",
        type=build_count_parser(0, MAX_RANKS),
        help="rank to draw (default: the one with the largest overhead)",
    )
    parser.add_argument(
        "--training", metavar="NAME", dest="name", help="draw this training only (default: all, 16 at most)"
    )
    frame.add_json(parser, "print what would be drawn (schema 1), and draw nothing")
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """Draw the report, or with --json return what would be drawn."""
    from gemini_hpc.report.drawing import require_matplotlib
    from gemini_hpc.report.report_data import build_document

    settings, job = frame.find_job(args)
    if not args.json:
        require_matplotlib()
    trainings, now = _fetch_trainings(settings, job, args.name, args.rank), clock.time()
    if args.json:
        return frame.Result(build_document(job, now, trainings), str)
    return frame.Result(write_report(job, now, trainings, args.output or f"gemini-{job}"), "\n".join)


def _fetch_trainings(settings: Settings, job: int, name: str | None, rank: int | None) -> list[Shown]:
    from gemini_hpc.query import ask
    from gemini_hpc.report.report_data import choose_ranks, combine_answers

    parts, recorded = ask.fetch_records(settings, job, lambda parts: choose_ranks(parts, name, rank))
    if not parts:
        raise UserError(f"job {job}: no agent answers; only a running job with replicas can be drawn")
    trainings = combine_answers(parts, recorded)
    if not trainings:
        whose = "any rank" if rank is None else f"rank {rank}"
        which = "" if name is None else f" of training {name[:64]!r}"
        raise UserError(
            f"job {job}: no traffic of {whose}{which} is recorded yet; gemini-hpc inspect shows what is known "
            "(ranks and agents of earlier versions record nothing)"
        )
    return trainings


def write_report(job: int, now: float, trainings: list[Shown], output: str) -> list[str]:
    """Draw everything and return the names of the files, the page first.

    Raises `UserError` if a file cannot be written.
    """
    from gemini_hpc.report.drawing import draw_overhead, draw_steps, draw_timeline
    from gemini_hpc.report.html_page import Pictures, render_page
    from gemini_hpc.report.report_data import list_saved_steps

    prefix = os.path.join(output, f"gemini-{job}") if os.path.isdir(output) or output.endswith("/") else output
    files: dict[str, bytes] = {}
    drawn = []
    for number, one in enumerate(trainings):
        pictures = Pictures(
            one,
            draw_timeline(one) if one.timeline is not None else None,
            draw_overhead(one) if one.series else None,
            draw_steps(one, now) if list_saved_steps(one) else None,
        )
        drawn.append(pictures)
        name = _choose_file_name(one.training, number)
        for what in ("steps", "timeline", "overhead"):
            png: bytes | None = getattr(pictures, what)
            if png is not None:
                files[f"{prefix}-{name}-{what}.png"] = png
    files = {f"{prefix}.html": render_page(job, now, drawn).encode(errors="replace"), **files}
    for path, content in files.items():
        try:
            with open(path, "wb") as out:
                out.write(content)
        except OSError as exc:
            raise UserError(f"{path}: {exc.strerror or exc}") from None
    return list(files)


def _choose_file_name(name: str, number: int) -> str:
    """Return a training's part of a file name.

    The training's name is its owner's choice, reported by an agent, and must not introduce a path.
    """
    if TRAINING_NAME.fullmatch(name):
        return name
    return f"set{number}"
