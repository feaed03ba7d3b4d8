"""Failure rates of nodes for `plan` and `simulate`: the options and the sources that they name."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini_hpc.cli.amounts import add_values, build_count_parser, build_number_parser
from gemini_hpc.cli.frame import UsageError
from gemini_hpc.files import read_regular_file

if TYPE_CHECKING:
    from gemini_hpc.forecast.rate import FailureRate
    from gemini_hpc.wire.inspect_schema import EventRecord

_SACCT_S = 120.0  # months of a busy site: slurmdbd needs a minute and more


def add_failures(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options; return the group of those that exclude each other."""
    rates = parser.add_mutually_exclusive_group()
    each = "failures of a node a day (default: 0.015)"
    days = "days of history to ask sacct for (default: 90)"
    share = "share of failures that destroy a node's memory (default: 0.5; with --history: 1)"
    add_values(rates, ("--failures-per-node-day", build_number_parser(0, 100), None, "F", each))
    rates.add_argument(
        "--history",
        metavar="FILE",
        help="take the rate from the site's past: a file with the output of sacct (docs/dev/reproduction.md), the "
        "word sacct, which asks Slurm, or a directory of jobs' event logs (the controller's state_dir/jobs)",
    )
    add_values(
        parser,
        ("--history-days", build_count_parser(1, 3650), 90, "N", days),
        ("--hardware", build_number_parser(0, 1), None, "SHARE", share),
    )
    return rates


def read_failure_rate(args: argparse.Namespace) -> FailureRate:
    """Return the failure rate that the options give. Raises `UsageError`."""
    from gemini_hpc.forecast.rate import FailureRate, derive_history_rate
    from gemini_hpc.slurm.accounting import parse_history
    from gemini_hpc.slurm.text import ParseError

    found = FailureRate()
    if args.failures_per_node_day is not None:
        found = replace(found, per_day=args.failures_per_node_day, source="as given")
    elif args.history is not None and args.history != "sacct" and os.path.isdir(args.history):
        found = _read_logged_rate(args.history)
    elif args.history is not None:
        where = f"sacct, {args.history_days} days" if args.history == "sacct" else args.history
        lines = _ask_sacct(args.history_days) if args.history == "sacct" else read_lines(args.history)
        try:
            found = derive_history_rate(parse_history(lines), where)
        except ParseError as error:
            raise UsageError(f"{where}: {error}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found if args.hardware is None else replace(found, hardware=args.hardware)


def _read_logged_rate(directory: str) -> FailureRate:
    """Return the rate in the event logs of this directory; invalid lines are ignored, as in `inspect`."""
    from gemini_hpc.forecast.rate import EventCounts, count_events, derive_event_rate

    seen = EventCounts()
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}") from None
    for name in names:
        if name.endswith(".jsonl"):
            seen += count_events(_read_events(os.path.join(directory, name)))
    try:
        return derive_event_rate(seen, directory)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _read_events(path: str) -> Iterator[EventRecord]:
    import msgspec

    from gemini_hpc.wire.inspect_schema import EventRecord

    decoder = msgspec.json.Decoder(EventRecord)
    for line in read_lines(path):
        with suppress(msgspec.MsgspecError):
            yield decoder.decode(line)


def _ask_sacct(days: int) -> list[str]:
    from gemini_hpc.slurm import Slurm, SlurmError

    try:
        return asyncio.run(Slurm(_SACCT_S).read_history(days)).split("\n")
    except SlurmError as error:
        raise UsageError(f"--history sacct: {error}; a rate can be given instead: --failures-per-node-day") from None


def read_lines(path: str, most_bytes: int = 64 << 20) -> list[str]:
    """Return the lines of a regular file. Raises `UsageError`, which names the file."""
    try:
        data = read_regular_file(path, most_bytes + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{path!r}: no name of a file") from None
    if len(data) > most_bytes:
        raise UsageError(f"{path}: more than {most_bytes >> 20} MiB")
    try:
        return data.decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}: line {line}: not UTF-8 text") from None
