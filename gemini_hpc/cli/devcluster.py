"""The verb `devcluster`: a real multi-node Slurm cluster on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from gemini_hpc import clock
from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import add_values, build_number_parser, parse_count
from gemini_hpc.devcluster import cgroups, chaos, profiles, requirements, status, teardown
from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.profiles import Setting

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Any]

_DESCRIPTION = """\
A real Slurm cluster (slurmctld, slurmd, munged) on this machine, each node in
namespaces of its own. It needs root and Debian's Slurm packages, and leaves
this machine's network, users and settings alone. Users alice and bob exist
inside only.
"""
_EXAMPLES = """\
example:
  gemini-hpc devcluster up --nodes 3
  gemini-hpc devcluster sbatch -N2 --gemini-replicas=2 job.sh
  gemini-hpc devcluster power-off n2
  gemini-hpc devcluster run -- squeue
  gemini-hpc devcluster down
"""

_parse_seconds = build_number_parser(0.001, 1e9)


class _VerbParser(argparse.ArgumentParser):
    """An argument parser that can leave the end of its command line unparsed.

    With `words_before_command` = n the parser accepts its own options and n positionals. The words after
    them, or after "--", become the namespace's `command`, options included. (argparse.REMAINDER rejects a
    command that starts with an option.)
    """

    def __init__(self, *, words_before_command: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._before = words_before_command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._before is None:
            return super().parse_known_args(args, namespace)
        words, index, positionals = list(args), 0, 0
        while index < len(words) and words[index] != "--":
            option = words[index].partition("=")[0]
            if option in self._option_string_actions:
                takes_value = self._option_string_actions[option].nargs != 0 and option == words[index]
                index += 2 if takes_value else 1
            elif positionals < self._before and not option.startswith("-"):
                index, positionals = index + 1, positionals + 1
            else:
                break
        result, unknown = super().parse_known_args(words[:index], namespace)
        result.command = words[index + (words[index : index + 1] == ["--"]) :]
        if not result.command:
            self.error("no command was given")
        return result, unknown


def register(subparsers: _Subparsers) -> None:
    """Add the verb `devcluster` to a command line; its `func` returns the exit status."""
    parser = subparsers.add_parser(
        "devcluster",
        help="a real multi-node Slurm cluster on this machine",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(
        dest="devcluster_verb", metavar="VERB", required=True, parser_class=_VerbParser, title="verbs"
    )
    _register_life(verbs)
    _register_commands(verbs)
    _register_nodes(verbs)


def _add_verb(
    verbs: _Subparsers, verb: str, sentence: str, action: Callable[[Any], None], **more: Any
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(verb, help=sentence, description=f"{sentence}.", **more)
    parser.set_defaults(func=partial(_run_verb, action))
    if verb != "list":
        parser.add_argument("--name", default="dev", help="which cluster (default: dev)")
    return parser


def _register_life(verbs: _Subparsers) -> None:
    up = _add_verb(verbs, "up", "Start a cluster and wait until all its nodes are idle", _start_cluster)
    up.add_argument("--nodes", type=parse_count, default=5, metavar="K", help="nodes n1..nK (default: 5)")
    meanings = "; ".join(f"{profile.name}: {profile.sentence}" for profile in profiles.PROFILES.values())
    up.add_argument("--profile", default="fast", help=f"{meanings} (default: fast)")
    up.add_argument("--cpus", type=parse_count, default=4, help="CPUs per node in Slurm's configuration (default: 4)")
    up.add_argument(
        "--memory-mb", type=parse_count, default=2000, help="MiB per node in Slurm's configuration (default: 2000)"
    )
    up.add_argument("--replace", action="store_true", help="take a running cluster of this name down first")
    up.add_argument("--no-site", action="store_true", help="without SPANK plugin, prolog and epilog")
    up.add_argument("--no-controller", action="store_true", help="without the gemini controller service")
    up.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the cluster's gemini.toml, e.g. heartbeat_s=0.5 (repeatable)",
    )
    _add_verb(verbs, "down", "End a cluster and remove every trace of it, even after a crash", _remove_cluster)
    shown = _add_verb(verbs, "status", "Show a cluster's nodes, their power and Slurm's view of them", _show_status)
    shown.add_argument("--json", action="store_true", help="one JSON object instead of text")
    _add_verb(verbs, "list", "List the clusters of this machine", _list_clusters)


def _register_commands(verbs: _Subparsers) -> None:
    usage = "%(prog)s [-h] [--name NAME] [--user USER]"
    run = _add_verb(
        verbs,
        "run",
        "Run a command on the controller host",
        _run_command,
        words_before_command=0,
        usage=f"{usage} [--] CMD ...",
    )
    execute = _add_verb(
        verbs,
        "exec",
        "Run a command on a node",
        _run_command,
        words_before_command=1,
        usage=f"{usage}\n           NODE [--] CMD ...",
    )
    execute.add_argument("node", metavar="NODE")
    run.set_defaults(node=None)
    for parser in (run, execute):
        parser.add_argument("--user", help="as this user, in their home (default: root)")
    sbatch = _add_verb(
        verbs,
        "sbatch",
        "Submit a job on the controller host; a script from this machine is copied into the user's home",
        _submit_job,
        words_before_command=0,
        usage=f"{usage}\n           [--] SBATCH-ARGUMENT ...",
    )
    sbatch.add_argument("--user", default="alice", help="as this user (default: alice)")


def _register_nodes(verbs: _Subparsers) -> None:
    off = _add_verb(verbs, "power-off", "Cut a node's power; its peers hear nothing more from it", _cut_power)
    off.add_argument("--reset", action="store_true", help="let its peers see their connections closed first")
    on = _add_verb(
        verbs,
        "power-on",
        "Start a node again, with empty memory; Slurm may still show it as DOWN (see resume)",
        _start_node,
    )
    resume = _add_verb(verbs, "resume", "Take a node out of DOWN and DRAIN", _resume_node)
    shape = _add_verb(verbs, "shape", "Limit a node's link in both directions", _limit_link)
    shape.add_argument("--rate", required=True, help="1gbit, 200mbit, ... or off")
    for parser in (off, on, resume, shape):
        parser.add_argument("node", metavar="NODE")
    _register_chaos(verbs)


def _register_chaos(verbs: _Subparsers) -> None:
    storm = _add_verb(
        verbs,
        "chaos",
        "Cut the power of random nodes with jobs, and give it back",
        _run_chaos,
        epilog="One line for each event: begin, cut, on (power again), back (in service again), none (no node to cut "
        "runs a job), stuck (a node does not come back), end. At the end, and after Ctrl-C, every node gets its "
        "power back.",
    )
    pace = storm.add_mutually_exclusive_group(required=True)
    repair = "from a cut until the node has power again; then Slurm is told to use it (default: 30)"
    add_values(
        pace,
        ("--mtbf", _parse_seconds, None, "SECONDS", "mean time between two cuts, exponentially distributed"),
        ("--every", _parse_seconds, None, "SECONDS", "the same time between any two cuts"),
    )
    add_values(
        storm,
        ("--repair", _parse_seconds, 30.0, "SECONDS", repair),
        ("--duration", _parse_seconds, None, "SECONDS", "end after so long (default: when no job is left)"),
        ("--seed", parse_count, None, "N", "the same moments and choices each time"),
    )
    storm.add_argument("--spare", nargs="+", default=[], metavar="NODE", help="nodes that are never cut")
    storm.add_argument("--json", action="store_true", help="one JSON object a line instead of text")


def _run_verb(action: Callable[[Any], None], args: Any) -> int:
    def run(args: Any) -> int:
        action(args)
        return 0

    try:
        return frame.run_verb("devcluster", run, (DevclusterError, OSError), args)
    except subprocess.TimeoutExpired as error:
        frame.print_error("devcluster", f"no answer within {error.timeout:g} s; is it overloaded?")
        return 1
    except KeyboardInterrupt:
        frame.print_error("devcluster", "interrupted")
        return 128 + signal.SIGINT


def _start_cluster(args: Any) -> None:
    cluster = Cluster.bring_up(
        args.name,
        args.nodes,
        args.profile,
        cpus=args.cpus,
        memory_mb=args.memory_mb,
        site=not args.no_site,
        controller=not args.no_controller,
        settings=dict(_parse_setting(text) for text in args.set),
        replace=args.replace,
    )
    print(f"cluster {cluster.name}: {len(cluster.node_names)} nodes idle after {cluster.ready_s:.2f} s")
    shown = cluster.read_status()
    absent = [part for part in ("plugin", "prolog", "epilog") if not getattr(shown, part)]
    if absent and not args.no_site:
        print(f"without {', '.join(absent)}: this installation has no such files")
    if why := cgroups.find_tracking_problem():
        print(f"without proctrack/cgroup: {why}; processes are tracked by their groups, and no memory is limited")
    print(f"files: {cluster.directory}")


def _parse_setting(text: str) -> tuple[str, Setting]:
    """Parse KEY=VALUE with a TOML value; a value that is no TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise DevclusterError(f"--set {text}: write KEY=VALUE, e.g. heartbeat_s=0.5")
    try:
        parsed: Setting = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    return key, parsed


def _remove_cluster(args: Any) -> None:
    requirements.check_root()
    found = teardown.tear_down(ClusterFiles(args.name))
    print(f"cluster {args.name}: {'gone' if found else 'there was none'}")


def _show_status(args: Any) -> None:
    shown = Cluster.attach(args.name).read_status()
    print(msgspec.json.encode(shown).decode() if args.json else shown)


def _list_clusters(args: Any) -> None:
    for name, alive in status.list_clusters().items():
        print(f"{name}\t{'running' if alive else f'dead: gemini-hpc devcluster down --name {name}'}")


def _run_command(args: Any) -> None:
    _exec_command(Cluster.attach(args.name), args.command, args.user, args.node)


def _submit_job(args: Any) -> None:
    cluster = Cluster.attach(args.name)
    _exec_command(cluster, ["sbatch", *cluster.copy_script(args.command, args.user)], args.user, None)


def _exec_command(cluster: Cluster, command: Sequence[str], user: str | None, node: str | None) -> NoReturn:
    """Replace this process by the command, which then owns terminal, signals and exit status."""
    terminal = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    argv, env = cluster.build_command(command, user, terminal, node=node)
    os.execve(argv[0], argv, env)


def _cut_power(args: Any) -> None:
    Cluster.attach(args.name).cut_power(args.node, args.reset)


def _start_node(args: Any) -> None:
    cluster, began = Cluster.attach(args.name), clock.monotonic()
    cluster.restore_power(args.node)
    print(f"{args.node}: registered after {clock.monotonic() - began:.2f} s, {cluster.read_node_state(args.node)}")


def _resume_node(args: Any) -> None:
    Cluster.attach(args.name).resume(args.node)


def _limit_link(args: Any) -> None:
    Cluster.attach(args.name).limit_link(args.node, None if args.rate == "off" else args.rate)


def _run_chaos(args: Any) -> None:
    def print_event(event: chaos.ChaosEvent) -> None:
        print(msgspec.json.encode(event).decode() if args.json else event, flush=True)

    weather = chaos.Weather(
        mtbf_s=args.mtbf or 0.0,
        every_s=args.every or 0.0,
        repair_s=args.repair,
        duration_s=args.duration,
        seed=args.seed,
        spare=args.spare,
    )
    chaos.Chaos(Cluster.attach(args.name), weather, print_event).run()
