"""The verb `controller`: run the service beside slurmctld."""

from __future__ import annotations

import argparse
import os

from gemini_hpc.cli import frame
from gemini_hpc.config import ConfigError, load_site_settings


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "controller",
        run,
        "gemini-hpc controller --verbose",
        "gemini-hpc controller --daemon",
        help="run the service beside slurmctld",
        description="Run the controller service as SlurmUser (root becomes SlurmUser), in the foreground, until "
        "SIGTERM. It logs to stderr.",
    )
    frame.add_config(parser)
    parser.add_argument(
        "--daemon", action="store_true", help="go to the background, log to controller.log below state_dir"
    )
    parser.add_argument(
        "--foreground", action="store_true", help="stay in the foreground (the default; kept for unit files of 0.2)"
    )
    parser.add_argument("--verbose", action="store_true", help="log every Slurm command with its duration")


def run(args: argparse.Namespace) -> int:
    """Run the controller and return the exit status."""
    try:
        settings = load_site_settings(args.config)
    except ConfigError as exc:
        raise frame.UsageError(str(exc)) from None
    from gemini_hpc.controller.startup import ServiceError, become_slurm_user, explain_elsewhere

    if reason := explain_elsewhere(settings):
        raise frame.UsageError(reason)
    if args.daemon:
        log = os.path.join(settings.state_dir, "controller.log")
        try:
            become_slurm_user(settings)  # first, because SlurmUser owns the directory and could put a link there
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except ServiceError as exc:
            raise frame.UserError(str(exc)) from None
        except OSError as exc:
            raise frame.UserError(f"{log}: {exc.strerror}") from None
        if pid := os.fork():
            print(f"gemini-hpc controller: runs in the background with pid {pid}, log: {log}")
            return 0
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, new in ((null, 0), (out, 1), (out, 2)):
            os.dup2(fd, new)
    from gemini_hpc.controller.service import main

    return main(settings, args.verbose)
