"""The controller service, killed (SIGKILL, by itself) at the n-th boundary between two of its actions.

Run on the controller host as SlurmUser: `dying.py N LOG`. A boundary is the moment before or after each line of the
journal and each Slurm command that changes something; LOG gets one line a boundary. N = 0: never.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from gemini_hpc.config import load_site_settings
from gemini_hpc.controller import service
from gemini_hpc.controller.journal import Journal
from gemini_hpc.slurm import Slurm

AT, LOG = int(sys.argv[1]), open(sys.argv[2], "a")  # noqa: SIM115 (open for life)
CHANGING = ("update", "create", "delete", "requeue")
count = 0
write, call = Journal.write_line, Slurm._call_tool


def boundary(what: str) -> None:
    global count  # noqa: PLW0603
    count += 1
    LOG.write(f"{count} {what}\n")
    LOG.flush()
    if count == AT:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_write(self: Journal, key: str, step: str, phase: str, **data: Any) -> None:
    boundary(f"before journal {step} {phase}")
    write(self, key, step, phase, **data)
    boundary(f"after journal {step} {phase}")


async def dying_call(self: Slurm, tool: str, *args: str, **more: Any) -> bytes:
    # An update without effect (ResetAccrueTime alone) is repeated as often as it takes.
    changes = tool == "scontrol" and args[0] in CHANGING and args[-1] != "ResetAccrueTime"
    if changes:
        boundary(f"before scontrol {' '.join(args)}")
    out = await call(self, tool, *args, **more)
    if changes:
        boundary(f"after scontrol {' '.join(args)}")
    return out


Journal.write_line = dying_write  # type: ignore[method-assign]
Slurm._call_tool = dying_call  # type: ignore[method-assign]
sys.exit(service.main(load_site_settings()))
