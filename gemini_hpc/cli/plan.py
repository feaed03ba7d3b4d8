"""The verb `plan`: show the possible protection of a training of a given size before its start."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import (
    REQUIRED,
    add_storage,
    add_values,
    build_count_parser,
    build_number_parser,
    parse_rate,
    parse_size,
)
from gemini_hpc.cli.failures import add_failures, read_failure_rate
from gemini_hpc.cli.plot import add_plot, draw_plans
from gemini_hpc.durations import format_age, format_seconds
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.forecast.protection import DomainLoss, Protection, RequestedProtection
    from gemini_hpc.forecast.rate import FailureRate

SCHEMA = 1
_USUAL = ("xor:4", "rs:4+2")


def _parse_redundancy(text: str) -> tuple[int, int]:
    from gemini_hpc.core.redundancy import parse_redundancy

    try:
        return parse_redundancy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "plan",
        run,
        "gemini-hpc plan --nodes 128 --state 1.1TB --network 200Gbps \\",
        "    --memory 1TB --iteration 12",
        help="compute the protection that a training can have",
        description="Compute the protection that a job of this size can have, for a number of copies and for one "
        "more. The table says whether copies fit into memory, how often a version is saved and what that costs. It "
        "says which losses of nodes a version survives, what a failure costs, and how often to save to the tier. "
        "Needs no Slurm, except sacct for --history sacct.",
        epilog="Nodes fail independently of each other; with --topology whole domains fail, too. The formulas: "
        "docs/dev/reproduction.md. Exit status: 0; 1 if the copies asked for do not fit; 2 for a wrong command line.",
    )
    share = "share of a node's memory that copies may use (default: the default of the setting memory_fraction)"
    idle = "share of an iteration in which the network is idle (default: 0.5; gemini-hpc report shows it)"
    imports = "seconds from the start of a program to its resume() (default: 60)"
    add_values(
        parser,
        ("--nodes", build_count_parser(1, 200_000), REQUIRED, "N", "number of nodes in the job"),
        ("--state", parse_size, REQUIRED, "SIZE", "training state over all ranks, such as 1.2TB"),
        ("--network", parse_rate, REQUIRED, "RATE", "network rate of a node, such as 200Gbps"),
        ("--memory", parse_size, REQUIRED, "SIZE", "memory of a node"),
        ("--memory-fraction", build_number_parser(0.01, 1), None, "SHARE", share),
        ("--iteration", build_number_parser(0.001, 1e5), REQUIRED, "S", "seconds per iteration of the training"),
        ("--replicas", build_count_parser(1, 8), 2, "M", "number of copies (default: 2)"),
        ("--idle", build_number_parser(0, 1), 0.5, "SHARE", idle),
    )
    add_storage(parser)
    add_failures(parser)
    add_values(parser, ("--imports", build_number_parser(0, 1e5), 60.0, "S", imports))
    parser.add_argument(
        "--redundancy",
        type=_parse_redundancy,
        action="append",
        metavar="HOW",
        help="add a column for parity, written as for sbatch --gemini-redundancy: xor:N or rs:K+M. May be repeated. "
        "replicate: no parity (default: xor:4 and rs:4+2)",
    )
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="file that says which nodes fail together, written like the setting failure_domains or topology.conf. "
        "Adds a row for the loss of a whole domain. The job runs on the first N nodes of the file",
    )
    add_plot(parser)
    frame.add_json(parser, "print one JSON document (schema 1)")


def run(args: argparse.Namespace) -> frame.Result:
    """Make the plan. The exit status is 1 if the copies asked for do not fit."""
    from gemini_hpc.forecast.protection import RequestedProtection, compute_domain_loss, predict_protection
    from gemini_hpc.forecast.schemes import TrainingFigures
    from gemini_hpc.settings import Settings

    fraction = args.memory_fraction or Settings().memory_fraction
    training = TrainingFigures(args.nodes, args.state, args.iteration, args.network, args.storage, args.replicas)
    try:
        failures = read_failure_rate(args)
        wish = RequestedProtection(
            training,
            args.memory * fraction,
            args.idle,
            per_day=failures.per_day,
            hardware=failures.hardware,
            imports_s=args.imports,
        )
        found = [
            predict_protection(wish, m)
            for m in (args.replicas, args.replicas + 1)
            if m <= max(args.nodes, args.replicas)
        ]
        for group, parity in args.redundancy or (_parse_redundancy(how) for how in _USUAL):
            if parity and (args.redundancy or group <= args.nodes):
                found.append(predict_protection(wish, group, parity=parity))
        node_domains = _read_domains(args)
        racks = (
            [compute_domain_loss(node_domains, one.replicas, parity=one.parity) for one in found]
            if node_domains
            else []
        )
        if args.plot:
            draw_plans(args.plot, wish, found)
    except ValueError as error:
        raise frame.UsageError(str(error)) from None
    lost = [asdict(one) for one in racks]
    plans = [_as_document(one) | {"domain_loss": lost[k] if lost else None} for k, one in enumerate(found)]
    document = {"schema": SCHEMA, "failures": asdict(failures), "plans": plans}
    return frame.Result(document, lambda _: format_plans(wish, found, failures, racks), int(not found[0].fits))


def _read_domains(args: argparse.Namespace) -> list[str]:
    """Return the failure domains of the job's nodes, [] if no file is named.

    Raises ValueError if the file cannot be used.
    """
    from gemini_hpc.core import topology

    if args.topology is None:
        return []
    try:
        with open(args.topology, encoding="utf-8", errors="replace") as file:
            found = topology.parse(file.read(topology.MAX_BYTES + 1))
    except OSError as error:
        raise ValueError(f"{args.topology}: {error.strerror}") from None
    except topology.TopologyError as error:
        raise ValueError(f"{args.topology}: {error}") from None
    if len(found) < args.nodes:
        raise ValueError(f"{args.topology} names {len(found)} nodes, the job has {args.nodes}")
    return list(found.values())[: args.nodes]


def _as_document(plan: Protection) -> dict[str, Any]:
    every_s = plan.tier_every_s
    return {**asdict(plan), "tier_every_s": every_s if math.isfinite(every_s) else None}


def format_plans(
    wish: RequestedProtection, plans: list[Protection], failures: FailureRate, racks: Sequence[DomainLoss] = ()
) -> str:
    """Return the plans as text: a line per fact, a column per plan.

    `racks` holds the failure domain results of each plan, if domains are known.
    """
    from gemini_hpc.report.columns import fold, measure_width
    from gemini_hpc.report.traffic_text import format_size

    def format_percent(share: float) -> str:
        """Return a percentage with enough digits to distinguish it from 100 %."""
        digits = 2 if share >= 1 or share <= 0.99 else min(9, 1 - math.floor(math.log10(1 - share)))
        return f"{100 * share:.{max(0, digits - 1)}f} %"

    def format_memory(plan: Protection) -> str:
        return f"{format_size(plan.needed_bytes)}{'' if plan.fits else ': TOO MUCH'}"

    def format_frequency(plan: Protection) -> str:
        return "each" if plan.every == 1 else f"1 in {plan.every}"

    def format_mean_time(plan: Protection) -> str:
        return format_age(86400 / plan.unserved_per_day) if plan.unserved_per_day else "never"

    def format_tier_interval(plan: Protection) -> str:
        return format_age(plan.tier_every_s) if math.isfinite(plan.tier_every_s) else "at the end"

    t = wish.training
    rows = [
        ("memory per node", [format_memory(p) for p in plans]),
        ("network time per save", [format_seconds(p.transfer_s) for p in plans]),
        ("CPU time for parity, per save", [format_seconds(p.fold_s) if p.parity else "-" for p in plans]),
        ("iterations saved", [format_frequency(p) for p in plans]),
        ("cost of saving", [f"{100 * p.overhead:.2f} %{'' if p.within else ': TOO MUCH'}" for p in plans]),
        ("iterations repeated, at most", [str(p.repeated) for p in plans]),
        *(
            (f"{k} node{'s' * (k > 1)} lost at once: survived", [format_percent(p.survival[k]) for p in plans])
            for k in plans[0].survival
        ),
        *([("a whole domain lost: survived", [format_percent(r.survived) for r in racks])] if racks else []),
        *([('with failure_domains = "none"', [format_percent(r.as_listed) for r in racks])] if racks else []),
        ("work lost per failure", [format_seconds(p.lost_s) for p in plans]),
        ("time to resume, by requeue", [format_seconds(p.down_s[0]) for p in plans]),
        ("time to resume, with a spare", [format_seconds(p.down_s[1]) for p in plans]),
        ("useful time, by requeue", [format_percent(p.effective[0]) for p in plans]),
        ("useful time, with a spare", [format_percent(p.effective[1]) for p in plans]),
        ("memory cannot repair, once in", [format_mean_time(p) for p in plans]),
        ("save to the tier every", [format_tier_interval(p) for p in plans]),
    ]
    lines = [
        f"{t.nodes} nodes, {format_size(t.node_bytes)} of state on each, "
        f"{format_size(wish.memory_bytes)} of memory for copies",
        *fold(sanitize(failures.describe()), measure_width()),
    ]
    cells = [("", [p.name for p in plans]), *rows]
    widths = [2 + max(len(texts[i]) for _, texts in cells) for i in range(len(plans))]
    for what, texts in cells:
        columns = "".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
        lines.append(f"{what:<32}{columns}".rstrip())
    return "\n".join(lines)
