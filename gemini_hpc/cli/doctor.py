"""The verb `doctor`: find faults on this host and in Slurm's configuration, and name their remedies."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from gemini_hpc import clock
from gemini_hpc.config import CONFIG_PATH, ConfigError, load

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Any]

    from gemini_hpc.doctor.facts import HostFacts

OK, WRONG, UNUSABLE = 0, 1, 2


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this host and Slurm's configuration",
        description="Check this host and Slurm's configuration against what gemini-hpc needs; nothing is changed. "
        "Run it as root on the controller host, on a node and on a login node; users see less. "
        "Exit status: 0 nothing is wrong (there may be warnings), 1 something is, 2 wrong command line or settings.",
    )
    parser.add_argument("--json", action="store_true", help="print the documented JSON document (schema 1)")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.add_argument(
        "--host-role",
        choices=("auto", "controller", "node", "login"),
        default="auto",
        help="what this host is (default: %(default)s, found out from Slurm)",
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
    parser.add_argument("--user", default=os.environ.get("SUDO_USER", ""), help="whose job the canary is")
    parser.add_argument("--yes", action="store_true", help="do not ask before the canary")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks and return the exit status.

    Returns:
        0 if no check finds a fault, 1 if a check does, 2 for a wrong command line or unusable settings.
    """
    from gemini_hpc.doctor import report
    from gemini_hpc.doctor.examine import CHECKS, examine
    from gemini_hpc.doctor.facts import HostFacts
    from gemini_hpc.paths import user
    from gemini_hpc.report import columns

    known = {c.name for c in CHECKS} | {c.name.partition(".")[0] for c in CHECKS}
    unknown = [name for name in args.only if name not in known]
    if unknown:
        names = ", ".join(sorted(c.name for c in CHECKS))
        print(f"gemini-hpc doctor: there is no check {unknown[0][:60]!r}: choose from {names}", file=sys.stderr)
        return UNUSABLE
    if args.config != CONFIG_PATH and not os.path.exists(args.config):
        print(f"gemini-hpc doctor: {args.config}: no such file", file=sys.stderr)
        return UNUSABLE
    facts = HostFacts(os.path.abspath(args.config), args.host_role)
    if args.canary:
        from gemini_hpc.cli import canary

        return canary.run(facts, args.canary, args.user, args.yes)
    if args.cluster:
        return _cluster(facts, args)
    findings = list(examine(facts, args.only))
    status = WRONG if any(f.status == "wrong" for f in findings) else OK
    try:
        load(args.config)
    except ConfigError as exc:
        print(f"gemini-hpc doctor: {exc}", file=sys.stderr)
        status = UNUSABLE
    for name in _accepted_of_no_check(facts, known):
        print(f"gemini-hpc doctor: accepted_warnings names no check: {name[:60]!r}", file=sys.stderr)
    roles, slurm = sorted(_roles(facts)), _release(facts)
    d = report.document(findings, facts.here, roles, user(facts.uid), slurm, status, clock.time())
    print(json.dumps(d) if args.json else report.text(d, columns.width()), flush=True)
    if any(t.name in known and t.is_alive() for t in threading.enumerate()):
        os._exit(status)  # a hanging check would hold up the end of this process
    return status


def _cluster(facts: HostFacts, args: argparse.Namespace) -> int:
    from gemini_hpc.doctor import cluster
    from gemini_hpc.doctor.finding import Unavailable
    from gemini_hpc.report import columns
    from gemini_hpc.slurm import Slurm

    why = cluster.need_root()
    if args.only or args.host_role != "auto":
        why = "--cluster goes with neither --only nor --host-role"
    try:
        nodes, partitions = ([], {}) if why else (list(facts.nodes.values()), facts.ask_slurm(Slurm.read_partitions))
    except Unavailable as exc:
        why, nodes, partitions = str(exc), [], {}
    if why:
        print(f"gemini-hpc doctor: {why}", file=sys.stderr)
        return UNUSABLE
    here = facts.here
    rows = cluster.gather(nodes, partitions, facts.config_path, here.settings_sha256)
    d = cluster.document(rows, here.host, here.settings_sha256, clock.time())
    print(json.dumps(d) if args.json else cluster.text(rows, here.host, here.settings_sha256, columns.width()))
    return int(d["status"])


def _accepted_of_no_check(facts: HostFacts, known: set[str]) -> list[str]:
    from gemini_hpc.doctor.finding import Unavailable

    try:
        return sorted(set(facts.settings.accepted_warnings) - known)
    except Unavailable:
        return []


def _roles(facts: HostFacts) -> frozenset[str]:
    from gemini_hpc.doctor.finding import Unavailable

    try:
        return facts.roles
    except Unavailable:
        return frozenset(("login",))


def _release(facts: HostFacts) -> str:
    from gemini_hpc.doctor.finding import Unavailable

    try:
        return str(facts.conf.release)
    except Unavailable:
        return ""
