"""Credentials by shared keys, for sites and jobs without MUNGE: authentic by a keyed MAC, fresh by time and nonce.

Keys follow from each other by keyed BLAKE2b, and no key leads back to the one above it:

    root's key of the site -> key of a user -> key of one of the user's jobs

A job's key may also stand alone, in a file of its owner. A ticket is a key of a user or job up to a time that its
name contains. The holder of a key above it derives it from its name, and keeps no list.

A credential names its key, maker, receiver and time, and ends with a MAC under that key. Nothing is encrypted, and
nothing has to be: the session's keys follow from both nonces *and* the key (`handshake`). Whoever records, replays or
relays a credential without the key can therefore not make one frame. A second sight of a credential is refused while
it is fresh, as munged does, so that a replay disturbs no session either.

The holder of root's key (controller, root) believes a uid only if the key follows from that uid. A holder of a job's
key cannot tell others who hold the same key apart: they are the job's owner and root, and it owes both obedience.
Whoever gets hold of a key later can derive the keys of recorded sessions, as with MUNGE; frames are no secret anyway.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.wire.credentials import TTL_S, CredentialError, Opened

KEY_BYTES = 32
MAX_CREDENTIAL_BYTES = 16 * 1024
_MAC_BYTES = 32
_MAGIC = b"GMK1"
_SUBJECT = struct.Struct(">BQIQ")  # kind, job, uid, end of a ticket (0: none)
_HEAD = struct.Struct(f">4s{_SUBJECT.size}sIIQ16s")  # ..., subject, maker, receiver, time, nonce
_ROOT, _USER, _JOB = 1, 2, 3
_SEEN = 100_000  # credentials to remember: 20 MB; more within two minutes come only from a peer that floods


class KeyFileError(Exception):
    """A key file that cannot be used; its text is one line."""


def _derive(key: bytes, purpose: bytes, text: bytes = b"") -> bytes:
    return hashlib.blake2b(text, key=key, person=purpose, digest_size=KEY_BYTES).digest()


def derive_user_key(site_key: bytes, cluster: str, uid: int) -> bytes:
    """Return a user's key on a cluster, by root's key of the site."""
    return _derive(site_key, b"gemini-hpc user", struct.pack(">I", uid) + cluster.encode())


def derive_job_key(of_user: bytes, job: int) -> bytes:
    """Return the key of a user's job, by the user's key.

    All incarnations of the job have the same key: the survivors of one must answer the next.
    """
    return _derive(of_user, b"gemini-hpc job", struct.pack(">Q", job))


def fingerprint(key: bytes) -> str:
    """Return a name of a key by which people compare it; the name tells nothing else."""
    return _derive(key, b"gemini-hpc name")[:6].hex()


def derive_tier_id(key: bytes) -> str:
    """Return the id by which the tier tells the job with this key from others of its number."""
    return _derive(key, b"gemini-hpc tier")[:8].hex()


def read_key(path: str, *owners: int) -> bytes:
    """Return the key in a file.

    Args:
        path: A file of one of the owners alone (mode 0600 or 0400), no link, in a directory in which nobody but them
            and root can write.
        owners: Uids that the file may belong to.

    Raises:
        KeyFileError: The file is missing, another kind of file, of another owner, or open to others.
    """
    try:
        above = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            info = os.fstat(above)
            if info.st_uid not in (*owners, 0) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise KeyFileError(f"key file {path}: others can write in its directory")
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(os.path.basename(path), flags, dir_fd=above)
        finally:
            os.close(above)
    except OSError as exc:
        raise KeyFileError(f"key file {path}: {exc.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise KeyFileError(f"key file {path}: wanted a plain file")
        if info.st_uid not in owners:
            wanted = " or ".join(map(str, owners))
            raise KeyFileError(f"key file {path}: wanted a file of uid {wanted}, found one of uid {info.st_uid}")
        if info.st_mode & 0o077:
            raise KeyFileError(f"key file {path}: wanted mode 0600, found {stat.S_IMODE(info.st_mode):04o}")
        key = os.read(fd, KEY_BYTES + 1)
    except OSError as exc:
        raise KeyFileError(f"key file {path}: {exc.strerror}") from None
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        size = "more" if len(key) > KEY_BYTES else str(len(key))
        raise KeyFileError(f"key file {path}: wanted {KEY_BYTES} bytes, found {size}")
    return key


def make_key(path: str) -> bytes:
    """Make a new key file of this process's user, mode 0600, and return the key.

    The directory above is made with mode 0700 if it does not exist; an existing file is never changed.

    Raises:
        KeyFileError: The file exists, or cannot be written.
    """
    key = os.urandom(KEY_BYTES)
    try:
        os.makedirs(os.path.dirname(path) or ".", 0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, key)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise KeyFileError(f"key file {path}: {exc.strerror}") from None
    return key


class _Seen:
    """The credentials that were opened and are still fresh."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, mac: bytes, until_s: int, now_s: float) -> bool:
        """Remember a credential; return False if it was opened before."""
        with self._lock:
            while self._until:
                first = next(iter(self._until))
                if self._until[first] >= now_s and len(self._until) < _SEEN:
                    break
                del self._until[first]
            if mac in self._until:
                return False
            self._until[mac] = until_s
            return True


class Keyed(ABC):
    """The common part of all holders of keys."""

    name = "key"

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._seen = _Seen()

    @abstractmethod
    def _choose_subject(self, for_uid: int, job: int) -> bytes:
        """Return the name of the key that begins a connection. Raises `CredentialError`."""

    @abstractmethod
    def _find_key(self, kind: int, job: int, uid: int, end_s: int) -> bytes:
        """Return the key of this name. Raises `CredentialError` if it is not in reach."""

    @abstractmethod
    def _may_claim(self, kind: int, uid: int, maker: int) -> bool:
        """Return whether a holder of the key of `uid` may call itself `maker`."""

    def encode(self, payload: bytes, *, for_uid: int, job: int, answers: Opened | None) -> bytes:
        """Return a credential, under the key of the credential that it answers. Raises `CredentialError`."""
        subject = answers.subject if answers else self._choose_subject(for_uid, job)
        key = self._find_key(*_SUBJECT.unpack(subject))
        head = _HEAD.pack(_MAGIC, subject, self._uid, for_uid, int(clock.time()), os.urandom(16))
        body = head + payload
        if len(body) + _MAC_BYTES > MAX_CREDENTIAL_BYTES:
            raise CredentialError("key: a credential of this size would be refused")
        return body + _derive(key, b"gemini-hpc mac", body)

    def decode(self, credential: bytes) -> Opened:
        """Return the content of a fresh credential for this process, once. Raises `CredentialError`."""
        if not _HEAD.size + _MAC_BYTES <= len(credential) <= MAX_CREDENTIAL_BYTES or credential[:4] != _MAGIC:
            raise CredentialError("key: malformed credential")
        body, mac = credential[:-_MAC_BYTES], credential[-_MAC_BYTES:]
        _, subject, maker, for_uid, made_s, _ = _HEAD.unpack_from(body)
        kind, job, uid, end_s = _SUBJECT.unpack(subject)
        key = self._find_key(kind, job, uid, end_s)
        if not hmac.compare_digest(mac, _derive(key, b"gemini-hpc mac", body)):
            raise CredentialError("key: invalid credential (another key, or changed on its way)")
        now = clock.time()
        if for_uid != self._uid:
            raise CredentialError("key: this credential is for another user")
        if not self._may_claim(kind, uid, maker):
            raise CredentialError(f"key: uid {uid}'s key does not speak for uid {maker}")
        if abs(now - made_s) > TTL_S:
            raise CredentialError(f"key: expired credential, or clocks more than {TTL_S} s apart")
        if end_s and now > end_s + TTL_S:
            raise CredentialError("key: expired ticket")
        if not self._seen.add(mac, made_s + TTL_S, now):
            raise CredentialError("key: replayed credential")
        return Opened(body[_HEAD.size :], maker, made_s, subject, _derive(key, b"gemini-hpc keys"))


class JobKeys(Keyed):
    """The keys of an agent, or of a process of its job's owner: that of its job, and of the job it continues."""

    def __init__(self, keys: Mapping[int, bytes], uid: int) -> None:
        """Hold the keys of jobs of one owner.

        Args:
            keys: Key of each job.
            uid: Uid of the owner, and of this process.
        """
        super().__init__(uid)
        self._keys = dict(keys)
        self._own = next(iter(self._keys))

    def _choose_subject(self, for_uid: int, job: int) -> bytes:
        if for_uid != self._uid:
            job = self._own  # the controller knows this agent by its own job
        return _SUBJECT.pack(_JOB, job, self._uid, 0)

    def _find_key(self, kind: int, job: int, uid: int, end_s: int) -> bytes:
        if kind != _JOB or job not in self._keys or uid != self._uid:
            raise CredentialError(f"key: not a key of job {self._own} of uid {self._uid}")
        return _derive_limited_key(self._keys[job], end_s)

    def _may_claim(self, kind: int, uid: int, maker: int) -> bool:
        return True


class SiteKey(Keyed):
    """Root's key of the site, from which all others follow: controller, and root's programs."""

    def __init__(self, key: bytes, cluster: str, slurm_uid: int, uid: int) -> None:
        """Hold the key.

        Args:
            key: The site's key.
            cluster: Name of the cluster.
            slurm_uid: Uid of the controller.
            uid: Uid of this process.
        """
        super().__init__(uid)
        self._site, self._cluster, self._slurm_uid = key, cluster, slurm_uid

    def _choose_subject(self, for_uid: int, job: int) -> bytes:
        if for_uid in (self._slurm_uid, 0):
            return _SUBJECT.pack(_ROOT, 0, 0, 0)
        return _SUBJECT.pack(_JOB, job, for_uid, 0)

    def _find_key(self, kind: int, job: int, uid: int, end_s: int) -> bytes:
        if kind == _ROOT and not uid:
            return _derive(self._site, b"gemini-hpc root", self._cluster.encode())
        if kind not in (_USER, _JOB):
            raise CredentialError("key: malformed credential")
        key = derive_user_key(self._site, self._cluster, uid)
        return _derive_limited_key(derive_job_key(key, job) if kind == _JOB else key, end_s)

    def _may_claim(self, kind: int, uid: int, maker: int) -> bool:
        return kind == _ROOT or maker == uid

    def issue_ticket(self, uid: int, job: int, end_s: int) -> Ticket:
        """Return a user's ticket.

        Args:
            uid: The user.
            job: Job of the user's whose agents take the ticket; 0: the controller takes it.
            end_s: Unix time of its end.
        """
        kind = _JOB if job else _USER
        return Ticket(uid, job, end_s, self._find_key(kind, job, uid, end_s))


def _derive_limited_key(key: bytes, end_s: int) -> bytes:
    return _derive(key, b"gemini-hpc until", struct.pack(">Q", end_s)) if end_s else key


@dataclass(frozen=True, slots=True)
class Ticket:
    """A key of a user up to a time, for the controller (job 0) or the agents of one job."""

    uid: int
    job: int
    end_s: int
    key: bytes = field(repr=False)


class Tickets(Keyed):
    """The tickets of a user's command, fetched when they are needed."""

    def __init__(self, fetch: Callable[[int], Ticket], slurm_uid: int, uid: int) -> None:
        """Hold no ticket yet.

        Args:
            fetch: Returns the ticket for a job (0: the controller). Raises `CredentialError`.
            slurm_uid: Uid of the controller.
            uid: Uid of this process.
        """
        super().__init__(uid)
        self._fetch, self._slurm_uid, self._held = fetch, slurm_uid, dict[int, Ticket]()

    def _choose_subject(self, for_uid: int, job: int) -> bytes:
        if for_uid not in (self._uid, self._slurm_uid):
            raise CredentialError("key: a job's agents answer its owner and root; ask the controller")
        at = job if for_uid == self._uid else 0
        ticket = self._held.get(at)
        if ticket is None or ticket.end_s < clock.time():
            ticket = self._held[at] = self._fetch(at)
        return _SUBJECT.pack(_JOB if at else _USER, at, ticket.uid, ticket.end_s)

    def _find_key(self, kind: int, job: int, uid: int, end_s: int) -> bytes:
        ticket = self._held.get(job)
        if ticket is None or (kind, uid, end_s) != (_JOB if job else _USER, ticket.uid, ticket.end_s):
            raise CredentialError("key: not under a ticket of this process")
        return ticket.key

    def _may_claim(self, kind: int, uid: int, maker: int) -> bool:
        return True
