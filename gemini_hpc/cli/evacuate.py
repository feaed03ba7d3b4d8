"""The verb `evacuate JOBID NODE`: move a running job off a node, with a spare of its own in the node's place."""

from __future__ import annotations

import argparse

from gemini_hpc.cli import frame
from gemini_hpc.wire.sanitize import sanitize


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "evacuate",
        run,
        "gemini-hpc evacuate 42 n3",
        help="move a running job off one of its nodes, onto a spare",
        description="Have a running job leave one of its nodes. Right after the next sealed version all ranks begin "
        "again in the same job step, with a spare (--gemini-spares) in the node's place. The node stays "
        "allocated to the job, idle. Draining it in Slurm does the same. For the job's owner, root and SlurmUser.",
        epilog="Exit status: 0 when the job goes on without the node; otherwise prints the reason and exits 1.",
    )
    frame.add_job(parser)
    frame.add_node(parser)
    frame.add_json(parser, "print one JSON document at the end")
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result:
    """Evacuate the node."""
    from gemini_hpc.query import ask

    settings, job = frame.find_job(args)
    ask.evacuate(settings, job, args.node)
    document = {"schema": 1, "job": job, "node": args.node}
    return frame.Result(document, lambda d: f"job {job} goes on without {sanitize(d['node'])}")
