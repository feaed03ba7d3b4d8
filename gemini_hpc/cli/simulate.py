"""The verb `simulate`: the cost of failures for a training under several schemes, and the papers' figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import (
    add_storage,
    add_values,
    build_count_parser,
    build_number_parser,
    parse_rate,
    parse_size,
)
from gemini_hpc.cli.failures import add_failures, read_failure_rate, read_lines
from gemini_hpc.cli.frame import UsageError
from gemini_hpc.cli.plot import add_plot, draw_outcomes
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.forecast.figures import Figure
    from gemini_hpc.forecast.simulation import Faults, NodeFailure, RunOutcome

_NAMES = ("gemini-9", "gemini-10", "gemini-12", "gemini-15a", "gemini-15b", "reft-8", "jit-table8", "goodput")
_SCHEMES = ("strawman", "highfreq", "gemini", "reft", "jit", "ours", "ours-spare")
SCHEMA = 1
_PROGRESS_EVERY_S = 0.1  # a terminal can show no more, and a scheme must not wait for it


def _parse_schemes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _SCHEMES:
            raise argparse.ArgumentTypeError(f"there is no scheme {name[:40]!r}: {', '.join(_SCHEMES)}")
    return list(dict.fromkeys(names))


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "simulate",
        run,
        "gemini-hpc simulate --figure gemini-15a",
        "gemini-hpc simulate --nodes 1000 --state 1.1TB --days 30",
        help="compute what failures cost a training, or print a paper's figure",
        description="Simulate a training under failures of its nodes, for several ways to protect it. Print the "
        "share of time spent on steps that are not repeated. Or print a paper's figure, as published and as "
        "computed.",
        epilog="Schemes: strawman (storage, every 3 h), highfreq (storage, as often as it can), gemini (peers' "
        "memory, every iteration), reft (own memory and parity over six nodes), jit (just-in-time, at user level), "
        "ours (this project, by requeue), ours-spare (with spares in the allocation). What they assume: "
        "docs/dev/reproduction.md.",
    )
    parser.add_argument(
        "--figure", choices=_NAMES, metavar="NAME", help=f"print this figure instead: {', '.join(_NAMES)}"
    )
    parser.add_argument(
        "--schemes", type=_parse_schemes, default=list(_SCHEMES), help="comma-separated (default: all)"
    )
    add_values(
        parser,
        ("--nodes", build_count_parser(2, 200_000), 1000, "N", "number of nodes (default: 1000)"),
        ("--state", parse_size, 1203e9, "SIZE", "training state over all ranks (default: 1.2TB)"),
        ("--iteration", build_number_parser(0.01, 1e5), 62.0, "S", "seconds of an iteration (default: 62)"),
        ("--network", parse_rate, 50e9, "RATE", "network rate of a node, in bits/s (default: 400Gbps)"),
    )
    add_storage(parser)
    add_failures(parser).add_argument(
        "--trace",
        metavar="FILE",
        help="read the failures from FILE; each line has seconds, node ranks and kind, such as '3600 4-7,9 hardware'",
    )
    bursts = "shape of the failures' Weibull distribution; below 1 they come in bursts (default: 1)"
    add_values(
        parser,
        ("--replicas", build_count_parser(1, 8), 2, "M", "copies in memory (default: 2)"),
        ("--standby", build_count_parser(0, 100_000), 0, "N", "standby nodes outside the job (default: 0)"),
        ("--days", build_number_parser(0.01, 3650), 30.0, None, "days to simulate (default: 30)"),
        ("--shape", build_number_parser(0.1, 10), 1.0, None, bursts),
        (
            "--repair",
            build_number_parser(0, 1e4),
            24.0,
            "HOURS",
            "hours until a failed node is repaired (default: 24)",
        ),
        ("--seed", build_count_parser(0, 1 << 31), 1, None, "seed of the failures (default: 1)"),
    )
    add_plot(parser)
    frame.add_json(parser, "print one JSON document (schema 1)")


def run(args: argparse.Namespace) -> frame.Result:
    """Simulate, or look up a figure.

    Raises:
        UsageError: Options contradict each other, or a file is unusable.
    """
    from gemini_hpc.forecast.figures import FIGURES
    from gemini_hpc.forecast.simulation import Faults

    if args.figure and args.plot:
        raise UsageError("--plot draws a simulation, and no figure of --figure")
    if args.figure == "goodput":
        return _build_goodput()
    if args.figure:
        figure = FIGURES[args.figure]()
        document = {"schema": SCHEMA, "figure": args.figure, **asdict(figure)}
        return frame.Result(document, lambda _: format_figure(figure))
    if args.replicas > args.nodes:
        raise UsageError(f"{args.replicas} replicas on {args.nodes} nodes: wanted at most one per node")
    try:
        rate = read_failure_rate(args)
        faults = Faults(rate.per_day, rate.hardware, args.shape, args.repair * 3600)
        outcomes = _simulate_schemes(args, faults)
        if args.plot:
            draw_outcomes(args.plot, _build_title(args, outcomes), outcomes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    failures = {"per_day": None, "hardware": None, "source": args.trace} if args.trace else asdict(rate)
    found = {name: {**asdict(o), "goodput": o.goodput} for name, o in outcomes.items()}
    failures_text = f"failures: those of {args.trace}" if args.trace else rate.describe()
    document = {"schema": SCHEMA, "failures": failures, "schemes": found}
    return frame.Result(document, lambda _: _format_outcomes(args, outcomes, failures_text))


def _simulate_schemes(args: argparse.Namespace, faults: Faults) -> dict[str, RunOutcome]:
    """Return the outcomes by the name of the scheme. Raises `UsageError`, ValueError."""
    from gemini_hpc.forecast import schemes
    from gemini_hpc.forecast.simulation import simulate

    training = schemes.TrainingFigures(
        args.nodes, args.state, args.iteration, args.network, args.storage, replicas=args.replicas
    )
    failures = _prepare_failures(args, faults)
    live, found = sys.stderr.isatty(), {}
    try:
        for name in args.schemes:
            found[name] = simulate(
                schemes.SCHEMES[name](training),
                schemes.build_strawman(training),
                _show_progress(name, failures(), args.days) if live else failures(),
                nodes=args.nodes,
                days=args.days,
                standby=args.standby,
                faults=faults,
            )
    finally:
        if live:
            frame.overwrite_line("")
    return found


def _prepare_failures(args: argparse.Namespace, faults: Faults) -> Callable[[], Iterable[NodeFailure]]:
    """Return a function that produces the same failures for each scheme."""
    from random import Random

    from gemini_hpc.forecast import trace

    if args.trace is None:
        return lambda: faults.draw_failures(args.nodes, args.days, Random(args.seed))
    try:
        found = trace.parse(read_lines(args.trace), args.nodes)
    except trace.TraceError as error:
        raise UsageError(f"{args.trace}: {error}") from None
    return lambda: found


def _show_progress(name: str, failures: Iterable[NodeFailure], days: float) -> Iterator[NodeFailure]:
    """Yield the failures, and show on the terminal how far the simulation has come."""
    shown_at = float("-inf")
    for failure in failures:
        if clock.monotonic() >= shown_at + _PROGRESS_EVERY_S:
            shown_at = clock.monotonic()
            frame.overwrite_line(f"{name}: {failure.at_s / 864 / days:.0f} %"[:79])
        yield failure


def _build_title(args: argparse.Namespace, outcomes: dict[str, RunOutcome]) -> str:
    failures = next(iter(outcomes.values())).failures
    return f"{args.nodes} nodes and {args.standby} that stand by, {args.days:g} days, {failures} failures of nodes"


def _format_outcomes(args: argparse.Namespace, outcomes: dict[str, RunOutcome], failures: str) -> str:
    from gemini_hpc.report.columns import fold, measure_width

    paid = args.nodes / (args.nodes + args.standby)
    lines = [
        _build_title(args, outcomes),
        *fold(sanitize(failures), measure_width()),
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


def _build_goodput() -> frame.Result:
    from gemini_hpc.forecast import goodput
    from gemini_hpc.report.columns import fold, measure_width

    rows = list(goodput.compute_rows())
    head = {"schema": SCHEMA, "figure": "goodput", "title": goodput.TITLE, "inputs": goodput.INPUTS}
    published = [asdict(one) for one in goodput.PUBLISHED]
    document = {**head, "rows": [asdict(row) for row in rows], "published": published}
    lines = [
        goodput.TITLE,
        *fold(goodput.INPUTS, measure_width()),
        "",
        f"{'GPUs':>7}  {'way':<34}{'lost, s':>8}{'goodput':>9}{'standby':>8}{'paid':>8}{'Llama':>8}",
    ]
    for row in rows:
        goodput_, paid, gentle = (f"{100 * share:.2f}" for share in (row.goodput, row.paid, row.gentle))
        lines.append(
            f"{row.gpus:>7}  {row.way:<34}{row.lost_s:>8.0f}{goodput_:>9}{row.standby:>8}{paid:>8}{gentle:>8}"
        )
    lines += [
        "",
        *fold("Lost: with each failure. Paid: with the nodes that stand by as cost. In per cent.", measure_width()),
    ]
    lines += ["", *(f"{one.gpus:>7}  {one.share}  {one.what} ({one.source})" for one in goodput.PUBLISHED)]
    return frame.Result(document, lambda _: "\n".join(lines))


def format_figure(figure: Figure) -> str:
    """Return the figure as text for a terminal."""
    from gemini_hpc.report.columns import fold, measure_width

    what, published = (max(len(getattr(row, column)) for row in figure.rows) for column in ("what", "published"))
    published = max(published, len("published"))
    ours = max(len(row.ours) for row in figure.rows)
    lines = [
        figure.title,
        *fold(figure.inputs, measure_width()),
        "",
        f"{'':<{what}}  {'published':<{published}}  computed",
    ]
    for row in figure.rows:
        line = f"{row.what:<{what}}  {row.published:<{published}}  {row.ours:<{ours}}  {row.note}".rstrip()
        lines.append(line)
    return "\n".join(lines)
