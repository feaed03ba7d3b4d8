"""The Slurm client of this process, asking a development cluster: its commands are run inside."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gemini_hpc.devcluster import Cluster
from gemini_hpc.slurm import client

TOOLS = ("scontrol", "squeue", "sinfo", "sacctmgr")


def tools(cluster: Cluster, directory: Path, user: str | None = None) -> Path:
    """A directory of commands that run those of the same names inside."""
    directory.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        argv, env = cluster.build_command([f"/usr/bin/{tool}"], user=user)
        settings = [f"{key}={value}" for key, value in env.items()]
        script = directory / tool
        script.write_text(f'#!/bin/sh\nexec env -i {shlex.join(settings)} TZ=UTC LC_ALL=C {shlex.join(argv)} "$@"\n')
        script.chmod(0o755)
    return directory


def slurm(cluster: Cluster, directory: Path, patch: pytest.MonkeyPatch, user: str | None = None) -> client.Slurm:
    """The client, as `user` (default: root)."""
    patch.setattr(client, "_DIRECTORIES", (str(tools(cluster, directory, user)),))
    return client.Slurm()
