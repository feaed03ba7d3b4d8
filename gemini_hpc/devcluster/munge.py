"""The munged of a cluster: one for all hosts, or one on each."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from gemini_hpc.devcluster import enter
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.processes import ProcessId
from gemini_hpc.devcluster.requirements import find_program


def create_key(layout: ClusterFiles) -> None:
    """Create the key that all hosts share."""
    key = layout.munge / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def start(layout: ClusterFiles, hosts: Mapping[str, ProcessId]) -> None:
    """Start munged on several hosts at once, at its usual socket; they answer when the function returns."""
    started = {
        host: enter.start_command(enter.build_command(layout, process.pid, _build_argv(layout, host)))
        for host, process in hosts.items()
    }
    for host, process in started.items():
        done = enter.complete(process, None, 20.0)
        if done.returncode:
            raise DevclusterError(f"munged did not start on {host}: {' '.join(done.stderr.split())}")


def _build_argv(layout: ClusterFiles, host: str) -> list[str]:
    return [
        find_program("munged"),
        f"--key-file={layout.munge / 'munge.key'}",
        f"--log-file={layout.munge / f'munged.{host}.log'}",
        f"--seed-file={layout.munge / f'munged.{host}.seed'}",
        "--pid-file=/run/munge/munged.pid",
        "--socket=/run/munge/munge.socket.2",
        "--num-threads=4",
    ]
