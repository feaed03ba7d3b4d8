"""Users that exist only inside a cluster, the files of /etc that define them, and batch scripts in their homes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.network import CONTROLLER, CONTROLLER_ADDRESS, derive_node_address

USERS = {"alice": 5001, "bob": 5002, "carol": 5003}


@dataclass(frozen=True)
class Account:
    """A user of the cluster."""

    name: str
    uid: int
    gid: int
    home: Path


def write(layout: ClusterFiles, nodes: list[str]) -> None:
    """Write etc/passwd, etc/group and etc/hosts, and make the homes of the cluster's own users."""
    passwd = [f"{name}:x:{uid}:{uid}:{name}:{layout.home / name}:/bin/bash" for name, uid in USERS.items()]
    group = [f"{name}:x:{uid}:" for name, uid in USERS.items()]
    for lines, host_file in ((passwd, Path("/etc/passwd")), (group, Path("/etc/group"))):
        lines += [line for line in host_file.read_text().splitlines() if line.split(":")[0] not in USERS]
        (layout.etc / host_file.name).write_text("\n".join(lines) + "\n")
    hosts = ["127.0.0.1 localhost", f"{CONTROLLER_ADDRESS} {CONTROLLER}"]
    hosts += [f"{derive_node_address(node)} {node}" for node in nodes]
    (layout.etc / "hosts").write_text("\n".join(hosts) + "\n")
    for name, uid in USERS.items():
        home = layout.home / name
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)


def find_account(layout: ClusterFiles, name: str) -> Account:
    """Return a user as the cluster knows it."""
    for line in (layout.etc / "passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) == 7:
            return Account(name, int(fields[2]), int(fields[3]), Path(fields[5]))
    raise DevclusterError(
        f"cluster {layout.name} has no user {name!r}; it has {', '.join(USERS)} and this host's users"
    )


def copy_script(arguments: Sequence[str], user: Account) -> list[str]:
    """Return the arguments of sbatch, with its script replaced by a copy in the user's home.

    The script lies where the tool was called, which users inside may not be able to read. The script is the
    first argument that names a file starting with `#!`, as sbatch demands of scripts. All other arguments
    stay unchanged.
    """
    staged = list(arguments)
    for index, argument in enumerate(staged):
        path = Path(argument)
        if argument.startswith("-") or not _is_script(path) or path.resolve().is_relative_to(user.home):
            continue
        copy = user.home / path.name
        # The home belongs to the user: never write through a link in it.
        copy.unlink(missing_ok=True)
        fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
        with open(fd, "wb") as target, path.open("rb") as script:
            os.fchown(fd, user.uid, user.gid)
            shutil.copyfileobj(script, target)
        staged[index] = str(copy)
        break
    return staged


def _is_script(path: Path) -> bool:
    try:
        return path.is_file() and path.open("rb").read(2) == b"#!"
    except OSError:
        return False
