"""The credentials of a site without MUNGE (`auth = "key"`): root's key file, an agent's keys, a user's tickets.

Root and SlurmUser read the key file. The prolog derives the key of a job and hands it to the agent through a pipe,
never in arguments or the environment. A user's command fetches a ticket from root's service on its host
(`node.tickets`), which knows the user from the kernel.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection

from gemini_hpc.settings import ConfigError, Settings
from gemini_hpc.wire import credentials, keyed
from gemini_hpc.wire.credentials import CredentialError

KEY_PATH = "/etc/gemini-hpc/auth.key"
TICKETS_PATH = "/run/gemini-hpc-tickets.sock"
ASK = struct.Struct(">Q")  # job, or 0
TICKET = struct.Struct(f">IQQ{keyed.KEY_BYTES}s")  # uid, job, end, key
_TIMEVAL = struct.Struct("@ll")
_FETCH_S = 3.0  # the service answers within milliseconds; a host at its limits may take a thousand times longer
_KEY = struct.Struct(f">Q{keyed.KEY_BYTES}s")


def read(settings: Settings) -> bytes:
    """Return the site's key, as root or SlurmUser. Raises `KeyFileError`."""
    return keyed.read_key(KEY_PATH, 0, *settings.list_slurm_uids())


def build_site_key(settings: Settings, uid: int) -> keyed.SiteKey:
    """Return the scheme of the controller and of root's programs.

    Args:
        settings: The site's settings.
        uid: Uid under which the process makes and opens credentials.

    Raises:
        KeyFileError: The key file cannot be used.
        ConfigError: The SlurmUser is unknown here.
    """
    return keyed.SiteKey(read(settings), settings.cluster_name, settings.find_slurm_uid(), uid)


def adopt(settings: Settings) -> None:
    """Choose this process's scheme by the settings, for commands of root and users; once is enough."""
    if settings.auth != "key" or credentials.get_scheme().name == "key":
        return
    uid = os.geteuid()
    try:
        slurm_uid = settings.find_slurm_uid()
        if uid == 0 or (uid == slurm_uid and os.access(KEY_PATH, os.R_OK)):
            credentials.use(build_site_key(settings, uid))
        else:
            credentials.use(keyed.Tickets(fetch, slurm_uid, uid))
    except (keyed.KeyFileError, ConfigError) as exc:
        raise CredentialError(f"key: {exc}") from None


def pack(settings: Settings, uid: int, jobs: Collection[int]) -> bytes:
    """Return the keys of a user's jobs for an agent, its own job's first. Raises `KeyFileError`."""
    of_user = keyed.derive_user_key(read(settings), settings.cluster_name, uid)
    return b"".join(pack_key(job, keyed.derive_job_key(of_user, job)) for job in jobs)


def pack_key(job: int, key: bytes) -> bytes:
    """Return a job's key as `choose_scheme` reads it."""
    return _KEY.pack(job, key)


def choose_scheme(fd: int, uid: int) -> None:
    """Choose the agent's scheme by the keys in a pipe, and close the pipe.

    Args:
        fd: The pipe's end, from the agent's starter.
        uid: Uid of the job's owner.

    Raises:
        CredentialError: The pipe does not contain keys.
    """
    try:
        with open(fd, "rb") as pipe:
            packed = pipe.read(2 * _KEY.size + 1)
    except OSError as exc:
        raise CredentialError(f"key: no key was handed over: {exc.strerror}") from None
    if len(packed) not in (_KEY.size, 2 * _KEY.size):
        raise CredentialError(f"key: {len(packed)} bytes were handed over that are no keys")
    credentials.use(keyed.JobKeys(dict(_KEY.iter_unpack(packed)), uid))


def fetch(job: int) -> keyed.Ticket:
    """Return this user's ticket for the agents of a job (0: for the controller) from root's service on this host.

    Raises:
        CredentialError: Nobody answers, or somebody else than root.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # With a time-out of Python's, connect() fails at once where others wait to be accepted.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(_FETCH_S), 0))
            sock.connect(TICKETS_PATH)
            sock.settimeout(_FETCH_S)
            if (other := credentials.read_peer(sock)[1]) != 0:
                raise CredentialError(f"key: uid {other} listens at {TICKETS_PATH}, wanted root")
            sock.sendall(ASK.pack(job))
            packed = b""
            while len(packed) < TICKET.size and (part := sock.recv(TICKET.size - len(packed))):
                packed += part
    except OSError as exc:
        raise CredentialError(
            f"key: no ticket for this user: {TICKETS_PATH}: {exc.strerror or exc}; "
            "gemini-hpc-tickets.service issues them, on hosts where it runs"
        ) from None
    if len(packed) != TICKET.size:
        raise CredentialError("key: no ticket for this user: the service has closed the connection")
    return keyed.Ticket(*TICKET.unpack(packed))
