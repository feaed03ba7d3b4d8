"""The key of a job that starts its own agents: a file of its owner alone, below the home that all nodes see.

The agents and the owner's commands prove with it who they are. From the key follows the id by which the tier tells
the job from others of its number. Whoever can read the owner's files has both, and needs neither.
"""

from __future__ import annotations

import os
import re

from gemini_hpc.config import ConfigError, Settings, build_own_settings, load_site_settings
from gemini_hpc.wire import credentials, keyed

UNNAMED = "cluster"
_DIRECTORY = "~/.gemini-hpc/jobs"
_CLUSTER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


def build_path(cluster: str, job: int) -> str:
    """Return the path of a job's key file.

    Args:
        cluster: Slurm's name of the cluster, since clusters may share homes; one that is not fit counts as none.
        job: The job's id.
    """
    return f"{os.path.expanduser(_DIRECTORY)}/{sanitize_cluster_name(cluster)}.{job}"


def sanitize_cluster_name(text: str) -> str:
    """Return Slurm's name of the cluster as file names and the tier have it."""
    return text if _CLUSTER.fullmatch(text) else UNNAMED


def make(name: str) -> bytes:
    """Return the key in a job's file, which is made first if it does not exist.

    Args:
        name: Path of the file.

    Raises:
        KeyFileError: The file cannot be used or made.
    """
    if os.path.lexists(name):
        return keyed.read_key(name, os.geteuid())
    try:
        os.makedirs(os.path.dirname(os.path.dirname(name)), 0o700, exist_ok=True)
    except OSError as exc:
        raise keyed.KeyFileError(f"key file {name}: {exc.strerror}") from None
    return keyed.make_key(name)


def find(job: int) -> bytes | None:
    """Return the key of a job of this user with its own agents, None if it has none here.

    The newest file counts if clusters that share this home have jobs of the same number.

    Raises:
        KeyFileError: The file cannot be used.
    """
    try:
        with os.scandir(os.path.expanduser(_DIRECTORY)) as entries:
            files = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.path)
                for entry in entries
                if _is_key_of(entry, job)
            ]
    except OSError:
        return None
    return keyed.read_key(max(files)[1], os.geteuid()) if files else None


def _is_key_of(entry: os.DirEntry[str], job: int) -> bool:
    return entry.name.rpartition(".")[2] == str(job)


def adopt(job: int, key: bytes) -> None:
    """Choose this process's scheme by the key of its user's job."""
    credentials.use(keyed.JobKeys({job: key}, os.geteuid()))


def load_settings(job: int, config: str) -> Settings:
    """Return the settings by which a job's agents are asked. If it has its own agents, its key is adopted.

    Args:
        job: The job's id.
        config: Path of the site's settings.

    Raises:
        ConfigError: The site's settings or the job's key file cannot be used.
    """
    try:
        key = find(job)
    except keyed.KeyFileError as exc:
        raise ConfigError(str(exc)) from None
    if key is None:
        return load_site_settings(config)
    adopt(job, key)
    return build_own_settings()
