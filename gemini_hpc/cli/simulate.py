"""The verb `simulate`: the cost of failures for a training under several schemes, and the papers' figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gemini_hpc.cli import plot
from gemini_hpc.cli.amounts import add_storage, count, number, rate, size
from gemini_hpc.cli.failures import add_failures, rate_of
from gemini_hpc.cli.job_id import UserError
from gemini_hpc.cli.plot import add_plot
from gemini_hpc.cli.progress import Progress
from gemini_hpc.cli.text_file import read_lines
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.forecast.figures import Figure
    from gemini_hpc.forecast.simulation import Faults, NodeFailure, RunOutcome

    _Subparsers = argparse._SubParsersAction[Any]

_NAMES = ("gemini-9", "gemini-10", "gemini-12", "gemini-15a", "gemini-15b", "reft-8", "jit-table8", "goodput")
_SCHEMES = ("strawman", "highfreq", "gemini", "reft", "jit", "ours", "ours-spare")
SCHEMA = 1


def _schemes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _SCHEMES:
            raise argparse.ArgumentTypeError(f"there is no scheme {name[:40]!r}: {', '.join(_SCHEMES)}")
    return list(dict.fromkeys(names))


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="what failures cost a training, and the papers' figures",
        description="Simulate a training under failures of its nodes, for several ways to protect it: how much of "
        "the time is training that stays. Or print a figure of a paper, as published and as computed here.",
        epilog="Schemes: strawman (storage, every 3 h), highfreq (storage, as often as it can), gemini (peers' "
        "memory, every iteration), reft (own memory and parity over six nodes), jit (just-in-time, at user level), "
        "ours (this project, by requeue), ours-spare (with spares in the allocation). What they assume: "
        "docs/dev/reproduction.md.",
    )
    parser.add_argument(
        "--figure", choices=_NAMES, metavar="NAME", help=f"print this figure instead: {', '.join(_NAMES)}"
    )
    parser.add_argument("--schemes", type=_schemes, default=list(_SCHEMES), help="comma-separated (default: all)")
    parser.add_argument("--nodes", type=count(2, 200_000), default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--state", type=size, default=1203e9, metavar="SIZE", help="of all ranks (default: 1.2TB)")
    parser.add_argument("--iteration", type=number(0.01, 1e5), default=62.0, metavar="S", help="default: 62 s")
    parser.add_argument(
        "--network", type=rate, default=50e9, metavar="RATE", help="of a node, in bits/s (default: 400Gbps)"
    )
    add_storage(parser)
    add_failures(parser).add_argument(
        "--trace",
        metavar="FILE",
        help="take the failures themselves from there: lines of seconds, node ranks and kind, such as "
        "'3600 4-7,9 hardware'",
    )
    parser.add_argument("--replicas", type=count(1, 8), default=2, metavar="M", help="copies in memory (default: 2)")
    parser.add_argument(
        "--standby", type=count(0, 100_000), default=0, metavar="N", help="nodes that wait (default: 0)"
    )
    parser.add_argument("--days", type=number(0.01, 3650), default=30.0, help="default: 30")
    parser.add_argument(
        "--shape",
        type=number(0.1, 10),
        default=1.0,
        help="of the Weibull distribution; below 1: bursts (default: 1)",
    )
    parser.add_argument(
        "--repair", type=number(0, 1e4), default=24.0, metavar="HOURS", help="of a node (default: 24)"
    )
    parser.add_argument("--seed", type=count(0, 1 << 31), default=1, help="of the failures (default: 1)")
    add_plot(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document (schema 1)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the results and return the exit status.

    Returns:
        0; 2 for options that contradict each other and for unusable files.
    """
    from gemini_hpc.forecast.figures import FIGURES
    from gemini_hpc.forecast.simulation import Faults

    if args.figure and args.plot:
        print("gemini-hpc simulate: --plot draws a simulation, and no figure of --figure", file=sys.stderr)
        return 2
    if args.figure == "goodput":
        print(_goodput(args.json))
        return 0
    if args.figure:
        figure = FIGURES[args.figure]()
        print(json.dumps({"schema": SCHEMA, "figure": args.figure, **asdict(figure)}) if args.json else table(figure))
        return 0
    if args.replicas > args.nodes:
        print(f"gemini-hpc simulate: {args.replicas} replicas on {args.nodes} nodes", file=sys.stderr)
        return 2
    try:
        rate = rate_of(args)
        faults = Faults(rate.per_day, rate.hardware, args.shape, args.repair * 3600)
        outcomes = _outcomes(args, faults)
        if args.plot:
            plot.outcomes(args.plot, _head(args, outcomes), outcomes)
    except (UserError, ValueError) as error:
        print(f"gemini-hpc simulate: {sanitize(str(error))}", file=sys.stderr)
        return 2
    if args.json:
        failures = {"per_day": None, "hardware": None, "source": args.trace} if args.trace else asdict(rate)
        found = {name: {**asdict(o), "goodput": o.goodput} for name, o in outcomes.items()}
        print(json.dumps({"schema": SCHEMA, "failures": failures, "schemes": found}))
    else:
        print(_lines(args, outcomes, f"failures: those of {args.trace}" if args.trace else rate.text()))
    return 0


def _outcomes(args: argparse.Namespace, faults: Faults) -> dict[str, RunOutcome]:
    """Return the outcomes by the name of the scheme. Raises `UserError`, ValueError."""
    from gemini_hpc.forecast import schemes
    from gemini_hpc.forecast.simulation import simulate

    training = schemes.TrainingFigures(
        args.nodes, args.state, args.iteration, args.network, args.storage, replicas=args.replicas
    )
    failures = _failures(args, faults)
    progress, found = Progress(), {}
    try:
        for name in args.schemes:
            found[name] = simulate(
                schemes.SCHEMES[name](training),
                schemes.strawman(training),
                _shown(progress, name, failures(), args.days),
                nodes=args.nodes,
                days=args.days,
                standby=args.standby,
                faults=faults,
            )
    finally:
        progress.done()
    return found


def _failures(args: argparse.Namespace, faults: Faults) -> Callable[[], Iterable[NodeFailure]]:
    """Return a function that produces the same failures for each scheme."""
    from random import Random

    from gemini_hpc.forecast import trace

    if args.trace is None:
        return lambda: faults.of(args.nodes, args.days, Random(args.seed))
    try:
        found = trace.parse(read_lines(args.trace), args.nodes)
    except trace.TraceError as error:
        raise UserError(f"{args.trace}: {error}") from None
    return lambda: found


def _shown(progress: Progress, name: str, failures: Iterable[NodeFailure], days: float) -> Iterator[NodeFailure]:
    for failure in failures:
        progress.show(f"{name}: {failure.at_s / 864 / days:.0f} %")
        yield failure


def _head(args: argparse.Namespace, outcomes: dict[str, RunOutcome]) -> str:
    failures = next(iter(outcomes.values())).failures
    return f"{args.nodes} nodes and {args.standby} that stand by, {args.days:g} days, {failures} failures of nodes"


def _lines(args: argparse.Namespace, outcomes: dict[str, RunOutcome], failures: str) -> str:
    from gemini_hpc.report.columns import fold, width

    paid = args.nodes / (args.nodes + args.standby)
    lines = [
        _head(args, outcomes),
        *fold(sanitize(failures), width()),
        f"{'scheme':<12}{'training':>10}{'of all paid':>13}{'stalled':>9}{'repeated':>10}{'down':>8}"
        f"{'from storage':>14}",
    ]
    for name, o in outcomes.items():
        shares = o.stalled_s / o.total_s, o.repeated_s / o.total_s, o.down_s / o.total_s
        stalled, repeated, down = (f"{100 * share:.2f} %" for share in shares)
        lines.append(
            f"{name:<12}{100 * o.goodput:>8.2f} %{100 * o.goodput * paid:>11.2f} %{stalled:>9}{repeated:>10}{down:>8}"
            f"{o.from_tier:>14}"
        )
    return "\n".join(lines)


def _goodput(as_json: bool) -> str:
    from gemini_hpc.forecast import goodput
    from gemini_hpc.report.columns import fold, width

    rows = list(goodput.rows())
    if as_json:
        head = {"schema": SCHEMA, "figure": "goodput", "title": goodput.TITLE, "inputs": goodput.INPUTS}
        published = [asdict(one) for one in goodput.PUBLISHED]
        return json.dumps({**head, "rows": [asdict(row) for row in rows], "published": published})
    lines = [
        goodput.TITLE,
        *fold(goodput.INPUTS, width()),
        "",
        f"{'GPUs':>7}  {'way':<34}{'lost, s':>8}{'goodput':>9}{'standby':>8}{'paid':>8}{'Llama':>8}",
    ]
    for row in rows:
        goodput_, paid, gentle = (f"{100 * share:.2f}" for share in (row.goodput, row.paid, row.gentle))
        lines.append(
            f"{row.gpus:>7}  {row.way:<34}{row.lost_s:>8.0f}{goodput_:>9}{row.standby:>8}{paid:>8}{gentle:>8}"
        )
    lines += ["", *fold("Lost: with each failure. Paid: with the nodes that stand by as cost. In per cent.", width())]
    lines += ["", *(f"{one.gpus:>7}  {one.share}  {one.what} ({one.source})" for one in goodput.PUBLISHED)]
    return "\n".join(lines)


def table(figure: Figure) -> str:
    """Return the figure as text for a terminal."""
    from gemini_hpc.report.columns import fold, width

    what, published = (max(len(getattr(row, of)) for row in figure.rows) for of in ("what", "published"))
    published = max(published, len("published"))
    ours = max(len(row.ours) for row in figure.rows)
    lines = [figure.title, *fold(figure.inputs, width()), "", f"{'':<{what}}  {'published':<{published}}  computed"]
    for row in figure.rows:
        line = f"{row.what:<{what}}  {row.published:<{published}}  {row.ours:<{ours}}  {row.note}".rstrip()
        lines.append(line)
    return "\n".join(lines)
