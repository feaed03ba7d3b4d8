"""The controller's steps before it serves: give up root, take its limits, and check its host."""

from __future__ import annotations

import os
import pwd
import resource
import socket
import stat

from gemini_hpc.config import Settings
from gemini_hpc.controller.primary import find_own_address, has_own_name
from gemini_hpc.node import privileges
from gemini_hpc.wire import credentials, keyed, site_key


class ServiceError(Exception):
    """An error for a host where the controller cannot run; the message contains the reason and the remedy."""


def explain_elsewhere(settings: Settings) -> str:
    """Return why no controller belongs on this host: the settings name others. "" if it may be one of them."""
    names = settings.list_controller_hosts()
    if not names or any(_may_be_here(name) for name in names):
        return ""
    return (
        f"controller_host is {', '.join(names)}, and this is {socket.gethostname()}: run the controller there, "
        "or change controller_host"
    )


def _may_be_here(host: str) -> bool:
    """Return whether a name is this host's or has one of its addresses; True for a name that cannot be resolved."""
    try:
        return has_own_name(host) or bool(find_own_address(host))
    except OSError:
        return True


def become_slurm_user(settings: Settings) -> None:
    """Run as SlurmUser for good, and make `state_dir` for that user.

    Agents and users encrypt their greetings for that uid alone, so root must become it. The site's key, if it has
    one, is read before.

    Raises:
        ServiceError: The process could not become SlurmUser. The caller must not go on then.
        OSError: As for `ServiceError`.
    """
    try:
        user = pwd.getpwnam(settings.slurm_user)
    except KeyError:
        raise ServiceError(f"slurm_user {settings.slurm_user!r} is not a user of this host") from None
    uid, gid = user.pw_uid, user.pw_gid
    _use_key(settings, uid)
    if os.geteuid() != 0:
        if os.geteuid() != uid:
            raise ServiceError(f"run the controller as {user.pw_name} (uid {uid}) or root, not as uid {os.geteuid()}")
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
        return
    _make_owned_directory(settings.state_dir, uid, gid)
    if uid == 0:
        return
    try:
        privileges.become_user(user)
    except privileges.PrivilegeError as exc:
        raise ServiceError(str(exc)) from None


def _use_key(settings: Settings, uid: int) -> None:
    if settings.auth != "key" or credentials.get_scheme().name == "key":  # `--daemon` has read it as root
        return
    try:
        credentials.use(site_key.build_site_key(settings, uid))
    except keyed.KeyFileError as exc:
        raise ServiceError(f"{exc}; it must be root's or {settings.slurm_user}'s, and readable here") from None


def _make_owned_directory(path: str, uid: int, gid: int) -> None:
    """Make `path` a directory that belongs to SlurmUser.

    Its parent may belong to SlurmUser, too, who could have put a link or another user's directory there. So root
    follows no link, and gives away only an empty directory of its own.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise ServiceError(f"state_dir {path} must be a directory, not a link: {exc.strerror}") from None
    try:
        info = os.fstat(fd)
        if info.st_uid == uid:
            return
        if info.st_uid != 0 or stat.S_IMODE(info.st_mode) & 0o022 or os.listdir(fd):
            raise ServiceError(
                f"state_dir {path} belongs to uid {info.st_uid} and is in use: wanted a directory of uid {uid}; "
                "chown it, with all that is in it, if it is the controller's"
            )
        os.fchmod(fd, 0o700)
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def raise_limits() -> None:
    """Raise the limit of descriptors: each agent needs one. A shell's usual 1024 is for programs with select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
