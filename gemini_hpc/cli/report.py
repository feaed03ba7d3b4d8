"""The verb `report JOBID`: draw a job's saved steps over time, one iteration's traffic, and the overhead."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from gemini_hpc import clock
from gemini_hpc.cli.job_id import UserError, WrongIdError, raw_id
from gemini_hpc.config import CONFIG_PATH, ConfigError, Settings
from gemini_hpc.core.numbers import TRAINING_NAME
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.report.report_data import Shown

    _Subparsers = argparse._SubParsersAction[Any]


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="draw a job's saved steps and what they cost, as PNG and as one HTML page",
        description="Draw the saved steps of a running job over time, with lost nodes and resumes, and the age of "
        "the newest save. Then draw what the ranks have recorded of their checkpoints' traffic: one iteration (the "
        "training's collectives, idle spans, chunks, copies, waits at the optimizer) and the overhead over time. "
        "Writes PNG files and one self-contained HTML page, and prints their names. Asks Slurm for the job's "
        "nodes and the agents on them; only the job's owner and operators are answered. Drawing needs matplotlib.",
    )
    parser.add_argument("job", metavar="JOBID", help="job id, or array task as 10_3")
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="prefix of the file names, or an existing directory (default: gemini-JOBID)",
    )
    parser.add_argument("--rank", metavar="R", type=_rank, help="draw this rank (default: the largest overhead)")
    parser.add_argument(
        "--training", metavar="NAME", dest="name", help="draw this training only (default: all, 16 at most)"
    )
    parser.add_argument("--json", action="store_true", help="print what would be drawn (schema 1), and draw nothing")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def _rank(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,7}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"wanted a rank, found {text[:40]!r}")


def run(args: argparse.Namespace) -> int:
    """Draw the report and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    from gemini_hpc.report.drawing import MissingError, require
    from gemini_hpc.report.report_data import document
    from gemini_hpc.wire import own_key

    try:
        job = raw_id(args.job)
        settings = own_key.settings_for(job, args.config)
        if not args.json:
            require()
        trainings, now = _shown(settings, job, args.name, args.rank), clock.time()
        if args.json:
            print(json.dumps(document(job, now, trainings)))
        else:
            for path in write(job, now, trainings, args.output or f"gemini-{job}"):
                print(path)
    except WrongIdError as exc:
        print(f"gemini-hpc report: {exc}", file=sys.stderr)
        return 2
    except (UserError, ConfigError, MissingError) as exc:
        print(f"gemini-hpc report: {sanitize(str(exc))}", file=sys.stderr)
        return 1
    return 0


def _shown(settings: Settings, job: int, name: str | None, rank: int | None) -> list[Shown]:
    from gemini_hpc.query import ask
    from gemini_hpc.report.report_data import choose, shown

    try:
        parts, recorded = ask.records(settings, job, lambda parts: choose(parts, name, rank))
    except ask.QueryError as exc:
        raise UserError(str(exc)) from None
    if not parts:
        raise UserError(f"job {job}: no agent answers; only a running job with replicas can be drawn")
    trainings = shown(parts, recorded)
    if not trainings:
        whose = "any rank" if rank is None else f"rank {rank}"
        which = "" if name is None else f" of training {name[:64]!r}"
        raise UserError(
            f"job {job}: no traffic of {whose}{which} is recorded yet; gemini-hpc inspect shows what is known "
            "(ranks and agents of earlier versions record nothing)"
        )
    return trainings


def write(job: int, now: float, trainings: list[Shown], output: str) -> list[str]:
    """Draw everything and return the names of the files, the page first.

    Raises `UserError` if a file cannot be written.
    """
    from gemini_hpc.report.drawing import overhead_png, steps_png, timeline_png
    from gemini_hpc.report.html_page import Pictures, render
    from gemini_hpc.report.report_data import saved_steps

    prefix = os.path.join(output, f"gemini-{job}") if os.path.isdir(output) or output.endswith("/") else output
    files: dict[str, bytes] = {}
    drawn = []
    for number, one in enumerate(trainings):
        pictures = Pictures(
            one,
            timeline_png(one) if one.timeline is not None else None,
            overhead_png(one) if one.series else None,
            steps_png(one, now) if saved_steps(one) else None,
        )
        drawn.append(pictures)
        name = _file_name(one.training, number)
        for what in ("steps", "timeline", "overhead"):
            png: bytes | None = getattr(pictures, what)
            if png is not None:
                files[f"{prefix}-{name}-{what}.png"] = png
    files = {f"{prefix}.html": render(job, now, drawn).encode(errors="replace"), **files}
    for path, content in files.items():
        try:
            with open(path, "wb") as out:
                out.write(content)
        except OSError as exc:
            raise UserError(f"{path}: {exc.strerror or exc}") from None
    return list(files)


def _file_name(name: str, number: int) -> str:
    """Return a training's part of a file name.

    The training's name is its owner's choice, reported by an agent, and must not introduce a path.
    """
    if TRAINING_NAME.fullmatch(name):
        return name
    return f"set{number}"
