"""Command line of `python -m gemini_hpc.launch SCRIPT ...` (see `main`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from gemini_hpc import lines
from gemini_hpc.client.joining import SOCKET_ENV
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.launch import placing, program
from gemini_hpc.launch.import_log import ImportLog
from gemini_hpc.launch.launcher import Launcher
from gemini_hpc.launch.rank_process import Forked, RankProcess, adopt_orphans, leave_traceback, note_error

_ABOUT = (
    "Start one rank of a training, and start it again in seconds when any rank of the step has failed. Give it to "
    "srun in place of python: srun python -m gemini_hpc.launch train.py ARGUMENTS. The launcher imports what SCRIPT "
    "imports, once, and forks the rank. When a rank fails on healthy nodes, all launchers of the step kill their "
    "ranks and fork new ones, which resume from the replicas in memory: no new step, no imports. When a node is "
    "lost, Slurm requeues the job as ever. Without an agent (no --gemini-replicas) SCRIPT runs as under python."
)


def main(words: list[str]) -> program.Program | int:
    """Return the program that this process must run now, or its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gemini_hpc.launch",
        description=_ABOUT,
        usage="%(prog)s [--max-restarts N] [-m] SCRIPT [ARGUMENTS ...]",
        epilog="Exit status: the rank's last one.",
    )
    parser.add_argument(
        "--max-restarts",
        type=_parse_count,
        default=3,
        metavar="N",
        help="start the ranks again at most N times, counted anew whenever a newer version is sealed (default 3)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module, as for python"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training's script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of SCRIPT")
    given = parser.parse_args(words)
    wanted = program.Program(given.script, given.module, tuple(given.arguments))
    if problem := wanted.find_problem():
        lines.write_line(f"launch: {problem}")
        return 2
    path = os.environ.get(SOCKET_ENV, "")
    try:
        if placing.count_spares(os.environ):
            placing.count_tasks_per_node(os.environ)
            if not path:
                place = placing.place_without_agent(os.environ)
                if place.node_rank < 0:
                    lines.write_line("launch: no agent here: this spare stays idle")
                    return 0
                os.environ.update(placing.build_rank_environment(os.environ, place))
    except ValueError as error:
        lines.write_line(f"launch: {error}")
        return 2
    if not path:
        return wanted
    wanted.prepare()
    imports = ImportLog()

    def start(env: Mapping[str, str]) -> RankProcess:
        why = program.find_fork_obstacle()
        if why:
            lines.write_line(f"launch: this attempt imports everything anew: {why}")
        return RankProcess(env, wanted.build_argv() if why else ())

    adopt_orphans()
    try:
        return Launcher(path, os.environ, given.max_restarts, start, imports).run()
    except Forked:
        imports.start_recording()
        return wanted


def _parse_count(text: str) -> int:
    if not 0 <= (count := parse_number(text, -1)) <= 1000:
        raise argparse.ArgumentTypeError(f"wanted a whole number from 0 to 1000, found {text[:40]!r}")
    return count


if __name__ == "__main__":
    outcome = main(sys.argv[1:])
    if isinstance(outcome, int):
        # srun and the requeue wait; the interpreter's teardown takes a second with what was imported for the ranks
        lines.flush_streams()
        os._exit(outcome)
    try:
        outcome.run()
    except (SystemExit, KeyboardInterrupt) as error:
        note_error(error)
        raise
    except BaseException as error:
        note_error(error)
        leave_traceback(error)
        sys.exit(1)
