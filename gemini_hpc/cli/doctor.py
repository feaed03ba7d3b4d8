"""The verb `doctor`: find faults on this host and in Slurm's configuration, and name their remedies."""

from __future__ import annotations

import argparse
import os
import threading
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.config import CONFIG_PATH, ConfigError, load_site_settings

if TYPE_CHECKING:
    from gemini_hpc.doctor.facts import HostFacts

OK, WRONG, UNUSABLE = 0, 1, 2


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "doctor",
        run,
        "sudo gemini-hpc doctor",
        "sudo gemini-hpc doctor --cluster",
        "sudo gemini-hpc doctor --canary debug",
        help="check this host and Slurm's configuration",
        description="Check this host and Slurm's configuration against what gemini-hpc needs; nothing is changed. "
        "Run it as root on the controller host, on a node and on a login node; users see less. "
        "Exit status: 0 nothing is wrong (there may be warnings), 1 something is, 2 wrong command line or settings.",
    )
    frame.add_json(parser)
    frame.add_config(parser)
    parser.add_argument(
        "--host-role",
        choices=("auto", "controller", "node", "login"),
        default="auto",
        help="role of this host (default: %(default)s, read from Slurm)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        default=[],
        help="only these checks, or groups of them (slurm, files, ...)",
    )
    parser.add_argument(
        "--cluster", action="store_true", help="one table of all nodes, each asked by a short srun; as root only"
    )
    parser.add_argument(
        "--canary",
        metavar="PARTITION",
        help="run a small protected job in this partition, and take one of its nodes away and back; as root only",
    )
    parser.add_argument("--user", default=os.environ.get("SUDO_USER", ""), help="user who submits the canary job")
    parser.add_argument("--yes", action="store_true", help="do not ask before the canary")


def run(args: argparse.Namespace) -> frame.Result | int:
    """Run the checks.

    Returns:
        The findings. The exit status is 0 if no check finds a fault, 1 if a check does, 2 for unusable settings.

    Raises:
        UsageError: The command line is wrong.
    """
    from gemini_hpc.doctor.examine import CHECKS, build_document, examine, format_document
    from gemini_hpc.doctor.facts import LOGIN, HostFacts
    from gemini_hpc.doctor.finding import read_or
    from gemini_hpc.paths import name_user
    from gemini_hpc.report import columns

    known = {c.name for c in CHECKS} | {c.name.partition(".")[0] for c in CHECKS}
    unknown = [name for name in args.only if name not in known]
    if unknown:
        names = ", ".join(sorted(c.name for c in CHECKS))
        raise frame.UsageError(f"there is no check {unknown[0][:60]!r}: choose from {names}")
    if args.config != CONFIG_PATH and not os.path.exists(args.config):
        raise frame.UsageError(f"{args.config}: no such file")
    facts = HostFacts(os.path.abspath(args.config), args.host_role)
    if args.canary:
        from gemini_hpc.cli import canary

        return canary.run(facts, args.canary, args.user, args.yes)
    if args.cluster:
        return _examine_cluster(facts, args)
    findings = list(examine(facts, args.only))
    status = WRONG if any(f.status == "wrong" for f in findings) else OK
    try:
        load_site_settings(args.config)
    except ConfigError as exc:
        frame.print_error("doctor", str(exc))
        status = UNUSABLE
    accepted: tuple[str, ...] = read_or((), lambda: facts.settings.accepted_warnings)
    for name in sorted(set(accepted) - known):
        frame.print_error("doctor", f"accepted_warnings in the settings names no check: {name[:60]!r}")
    roles = sorted(read_or(frozenset((LOGIN,)), lambda: facts.roles))
    slurm = read_or("", lambda: str(facts.conf.release))
    d = build_document(findings, facts.here, roles, name_user(facts.uid), slurm, status, clock.time())
    result = frame.Result(d, lambda d: format_document(d, columns.measure_width()), status)
    if any(t.name in known and t.is_alive() for t in threading.enumerate()):
        print(result.format(args.json), flush=True)
        os._exit(status)  # a hanging check would hold up the end of this process
    return result


def _examine_cluster(facts: HostFacts, args: argparse.Namespace) -> frame.Result:
    from gemini_hpc.doctor import cluster
    from gemini_hpc.doctor.finding import Unavailable
    from gemini_hpc.report import columns
    from gemini_hpc.slurm import Slurm

    if args.only or args.host_role != "auto":
        raise frame.UsageError("--cluster goes with neither --only nor --host-role")
    if os.geteuid():
        raise frame.UsageError("only root can examine other nodes: run it as root")
    try:
        nodes, partitions = list(facts.nodes.values()), facts.ask_slurm(Slurm.read_partitions)
    except Unavailable as exc:
        raise frame.UsageError(str(exc)) from None
    own_host = facts.here
    rows = cluster.gather(nodes, partitions, facts.config_path, own_host.settings_sha256)
    d = cluster.build_document(rows, own_host.host, own_host.settings_sha256, clock.time())
    text = cluster.format_table(rows, own_host.host, own_host.settings_sha256, columns.measure_width())
    return frame.Result(d, lambda _: text, d["status"])
