"""Credentials by shared keys: who may make and open them, and what a thief of one, or of a key file, gets."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc import clock
from gemini_hpc.wire import credentials, handshake, keyed
from gemini_hpc.wire.credentials import CredentialError, Scheme
from gemini_hpc.wire.frames import LENGTH_BYTES, Sealer
from gemini_hpc.wire.handshake import HandshakeError, LinkSession
from gemini_hpc.wire.keyed import JobKeys, KeyFileError, SiteKey, Ticket, Tickets

from .fake_munge import ALICE, BOB, ROOT, client

SLURM, CLUSTER, JOB = 64, "c", 7
SITE = bytes(range(32))


def key_of(job: int = JOB, uid: int = ALICE) -> bytes:
    return keyed.derive_job_key(keyed.derive_user_key(SITE, CLUSTER, uid), job)


def agent(job: int = JOB, uid: int = ALICE, *more: int) -> JobKeys:
    return JobKeys({each: key_of(each, uid) for each in (job, *more)}, uid)


def controller(key: bytes = SITE, cluster: str = CLUSTER) -> SiteKey:
    return SiteKey(key, cluster, SLURM, SLURM)


def root() -> SiteKey:
    return SiteKey(SITE, CLUSTER, SLURM, ROOT)


def tickets(uid: int = ALICE, lasts_s: int = 60) -> Tickets:
    return Tickets(lambda job: root().issue_ticket(uid, job, int(clock.time()) + lasts_s), SLURM, uid)


def made(scheme: Scheme, payload: bytes = b"x", *, for_uid: int = ALICE, job: int = JOB) -> bytes:
    return scheme.encode(payload, for_uid=for_uid, job=job, answers=None)


@contextmanager
def using(scheme: Scheme) -> Iterator[None]:
    before = credentials.use(scheme)
    try:
        yield
    finally:
        credentials.use(before)


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch, by_s: float) -> Iterator[None]:
    now = clock.time()
    with monkeypatch.context() as patch:
        patch.setattr(clock, "time", lambda: now + by_s)
        yield


def meet(caller: Scheme, server: Scheme, **changes: object) -> tuple[LinkSession, LinkSession]:
    calling = client(**changes)
    with using(caller):
        greeting = calling.build_greeting("10.0.0.1:17000")
    with using(server):
        opened = handshake.receive(greeting)
        reply, theirs = handshake.answer(opened, host="n2", restart=1, instance="i2", listening="10.0.0.1:17000")
    with using(caller):
        ours = calling.finish(reply)
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        frame = Sealer(sender.send_key).seal(b"x")[LENGTH_BYTES:]
        assert Sealer(receiver.receive_key).open(frame) == b"x"
    return ours, theirs


# ---- who meets whom ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caller", "server", "changes", "uids"),
    [
        (agent, agent, {}, (ALICE, ALICE)),
        (agent, controller, {"server_uid": SLURM, "purpose": "control"}, (SLURM, ALICE)),
        (root, controller, {"server_uid": SLURM, "purpose": "health"}, (SLURM, ROOT)),
        (root, agent, {"purpose": "query"}, (ALICE, ROOT)),
        (controller, agent, {"purpose": "query"}, (ALICE, SLURM)),
        (tickets, controller, {"server_uid": SLURM, "purpose": "query"}, (SLURM, ALICE)),
        (tickets, agent, {"purpose": "flush"}, (ALICE, ALICE)),
        (lambda: agent(8, ALICE, JOB), agent, {"purpose": "pull", "successor": 8}, (ALICE, ALICE)),
    ],
    ids=["peers", "agent-controller", "root-controller", "root-agent", "slurm-agent", "user", "owner", "successor"],
)
def test_both_ends_know_each_other(
    caller: Callable[[], Scheme], server: Callable[[], Scheme], changes: dict[str, object], uids: tuple[int, int]
) -> None:
    ours, theirs = meet(caller(), server(), **changes)
    assert (ours.peer_uid, theirs.peer_uid) == uids


# ---- who does not --------------------------------------------------------------------------------------


def test_wrong_keys() -> None:
    strangers = {
        "another site": (made(SiteKey(bytes(32), CLUSTER, SLURM, ROOT)), agent(), "invalid credential"),
        "another cluster": (made(SiteKey(SITE, "d", SLURM, ROOT)), agent(), "invalid credential"),
        "no key": (made(JobKeys({JOB: bytes(32)}, ALICE)), agent(), "invalid credential"),
        "another job": (made(agent(8), job=8), agent(), "not a key of job 7"),
        "another job's, renamed": (made(JobKeys({JOB: key_of(8)}, ALICE)), agent(), "invalid credential"),
        "another user": (made(agent(uid=BOB), for_uid=BOB), agent(), "not a key of job 7 of uid 5001"),
        "another user's, renamed": (made(JobKeys({JOB: key_of(uid=BOB)}, ALICE)), agent(), "invalid credential"),
        "for another": (made(agent(), for_uid=BOB), agent(), "for another user"),
        "a site to a controller": (
            made(SiteKey(bytes(32), CLUSTER, SLURM, ROOT), for_uid=SLURM),
            controller(),
            "invalid",
        ),
        "a user to an agent": (made(tickets(), for_uid=SLURM, job=0), agent(), "not a key of job 7"),
    }
    for name, (credential, opener, said) in strangers.items():
        assert said in refusal(CredentialError, opener.decode, credential), name


def lie(uid: int, maker: int, for_uid: int) -> bytes:
    """A credential under the key of a job of `uid`, whose owner calls himself `maker`."""
    subject = keyed._SUBJECT.pack(keyed._JOB, JOB, uid, 0)
    body = keyed._HEAD.pack(b"GMK1", subject, maker, for_uid, int(clock.time()), os.urandom(16)) + b"x"
    return body + keyed._derive(key_of(uid=uid), b"gemini-hpc mac", body)


def test_an_owner_cannot_call_himself_another_user() -> None:
    """Root's name in a credential under a job's key: the controller believes the key's own uid."""
    assert controller().decode(lie(ALICE, ALICE, SLURM)).uid == ALICE
    for uid in (ROOT, BOB, SLURM):
        said = refusal(CredentialError, controller().decode, lie(ALICE, uid, SLURM))
        assert said == f"key: uid {ALICE}'s key does not speak for uid {uid}", uid


def test_an_owners_answer_in_the_controllers_place() -> None:
    """Another user listens where the controller should: his job's key opens no greeting, and answers nobody."""
    for caller in (root(), tickets()):
        with using(caller):
            greeting = client(server_uid=SLURM).build_greeting()
        with using(agent(uid=BOB)), pytest.raises(HandshakeError, match="not a key"):
            handshake.receive(greeting)
    assert "does not speak for uid 64" in refusal(CredentialError, root().decode, lie(BOB, SLURM, ROOT))
    held = tickets()
    made(held, for_uid=SLURM)
    assert "not under a ticket" in refusal(CredentialError, held.decode, lie(BOB, SLURM, ALICE))


def test_a_thief_of_both_greetings_has_no_session_key() -> None:
    """Everything on the wire is readable; the session's keys follow from the job's key as well."""
    caller = client()
    with using(agent()):
        greeting = caller.build_greeting()
    with using(agent()):
        opened = handshake.receive(greeting)
        reply, session = handshake.answer(opened, host="n2", restart=1, instance="i2")
    assert opened.hello.share in greeting and opened.hello.nonce in greeting
    with using(agent()):
        share = handshake._answer.decode(handshake._open(reply).payload).share
    assert share in reply
    for secret in (b"", bytes(32), key_of(8), key_of(uid=BOB)):
        assert handshake._derive_keys(opened.hello, share, secret) != (session.receive_key, session.send_key)


def test_replayed_and_reflected_greetings() -> None:
    server = agent()
    with using(agent()):
        calling = client()
        greeting = calling.build_greeting()
        with pytest.raises(HandshakeError, match="malformed answer"):
            calling.finish(greeting)
    with using(server):
        reply, _ = handshake.answer(handshake.receive(greeting), host="n2", restart=1, instance="i2")
        with pytest.raises(HandshakeError, match="key: replayed credential"):
            handshake.receive(greeting)
        with pytest.raises(HandshakeError, match="malformed greeting"):
            handshake.receive(reply)
    with using(agent()), pytest.raises(HandshakeError, match="not to this greeting"):
        client().finish(reply)


def test_relayed_to_another_endpoint() -> None:
    with using(agent()):
        greeting = client().build_greeting("10.0.0.1:17000")
    with using(agent()), pytest.raises(HandshakeError, match="somebody in between"):
        handshake.answer(handshake.receive(greeting), host="n2", restart=1, instance="i", listening="10.0.0.1:17001")


@pytest.mark.parametrize("by_s", [-credentials.TTL_S - 2, credentials.TTL_S + 2])
def test_stale_times(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    credential = made(agent())
    with late(monkeypatch, by_s):
        assert "clocks more than 60 s apart" in refusal(CredentialError, agent().decode, credential)


def test_a_replay_is_refused_as_long_as_its_credential_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    server = agent()
    with late(monkeypatch, credentials.TTL_S - 2):
        credential = made(agent())  # of a host whose clock is ahead
    server.decode(credential)
    with late(monkeypatch, 2 * credentials.TTL_S - 4):
        server.decode(made(agent()))
        assert "replayed" in refusal(CredentialError, server.decode, credential)


def test_remembered_credentials_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    server = agent()
    with monkeypatch.context() as patch:
        patch.setattr(keyed, "_SEEN", 5)
        for _ in range(20):
            server.decode(made(agent()))
    assert len(server._seen._until) == 5
    with late(monkeypatch, credentials.TTL_S + 2):
        server.decode(made(agent()))
    assert len(server._seen._until) == 1


# ---- tickets -------------------------------------------------------------------------------------------


def test_tickets_end(monkeypatch: pytest.MonkeyPatch) -> None:
    held = tickets()
    ticket = root().issue_ticket(ALICE, JOB, int(clock.time()) + 60)
    with late(monkeypatch, 60 + credentials.TTL_S + 2):
        kept = Tickets(lambda job: ticket, SLURM, ALICE)  # a thief's, who fetches none
        assert "expired ticket" in refusal(CredentialError, agent().decode, made(kept))
        meet(held, agent(), purpose="query")


def test_a_ticket_cannot_be_made_to_last_longer() -> None:
    ticket = root().issue_ticket(ALICE, JOB, int(clock.time()) + 1)
    longer = Tickets(lambda job: Ticket(ALICE, job, ticket.end_s + 3600, ticket.key), SLURM, ALICE)
    assert "invalid credential" in refusal(CredentialError, agent().decode, made(longer))
    another = Tickets(lambda job: Ticket(ALICE, 8, ticket.end_s, ticket.key), SLURM, ALICE)
    assert "invalid credential" in refusal(CredentialError, agent(8).decode, made(another, job=8))


def test_a_users_ticket_for_anothers_job_opens_nothing() -> None:
    """bob asks for a ticket of alice's job: root's service names bob in it."""
    assert "not a key of job 7" in refusal(CredentialError, agent().decode, made(tickets(BOB), for_uid=BOB))
    assert "ask the controller" in refusal(CredentialError, lambda: made(tickets(BOB), for_uid=ALICE))


# ---- malformed -----------------------------------------------------------------------------------------


def test_truncated_and_oversized() -> None:
    credential = made(agent(), bytes(100))
    for end in range(len(credential)):
        assert refusal(CredentialError, agent().decode, credential[:end]), end
    for data in (credential + b"\0", b"", bytes(keyed.MAX_CREDENTIAL_BYTES + 1)):
        assert refusal(CredentialError, agent().decode, data), len(data)
    assert "of this size" in refusal(CredentialError, lambda: made(agent(), bytes(keyed.MAX_CREDENTIAL_BYTES)))


def test_each_changed_byte_is_seen() -> None:
    credential = made(agent(), b"payload")
    for at in range(len(credential)):
        changed = credential[:at] + bytes([credential[at] ^ (1 << random.randrange(8))]) + credential[at + 1 :]
        assert refusal(CredentialError, agent().decode, changed), at
        assert refusal(CredentialError, controller().decode, changed), at


@given(st.binary(max_size=200), st.booleans())
def test_noise(data: bytes, ours: bool) -> None:
    for opener in (agent(), controller(), tickets()):
        assert refusal(CredentialError, opener.decode, b"GMK1" + data if ours else data)


# ---- key files -----------------------------------------------------------------------------------------


def test_a_jobs_own_key_file(tmp_path: Path) -> None:
    path = tmp_path / "own" / "key"
    key = keyed.make_key(str(path))
    assert keyed.read_key(str(path), os.getuid()) == key and len(key) == keyed.KEY_BYTES
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert "exists" in refusal(KeyFileError, keyed.make_key, str(path))
    meet(JobKeys({JOB: key}, ALICE), JobKeys({JOB: keyed.read_key(str(path), os.getuid())}, ALICE))


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.chmod(0o640), "wanted mode 0600, found 0640"),
        (lambda path: path.chmod(0o604), "wanted mode 0600, found 0604"),
        (lambda path: path.parent.chmod(0o777), "others can write in its directory"),
        (lambda path: path.parent.chmod(0o770), "others can write in its directory"),
        (_linked, "symbolic links"),
        (_piped, "wanted a plain file"),
        (lambda path: (path.unlink(), path.mkdir(0o700)), "wanted a plain file"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(bytes(31)), "wanted 32 bytes, found 31"),
        (lambda path: path.write_bytes(b""), "wanted 32 bytes, found 0"),
        (lambda path: path.write_bytes(bytes(33)), "wanted 32 bytes, found more"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
    path = tmp_path / "own" / "key"
    keyed.make_key(str(path))
    spoil(path)
    assert said in refusal(KeyFileError, keyed.read_key, str(path), os.getuid())


@pytest.mark.slow
def test_key_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "own" / "key"
    keyed.make_key(str(path))
    if os.getuid():
        assert "wanted a file of uid" in refusal(KeyFileError, keyed.read_key, str(path), os.getuid() + 1)
        return
    os.chown(path, BOB, BOB)
    assert "wanted a file of uid 0, found one of uid 5002" in refusal(KeyFileError, keyed.read_key, str(path), 0)
    assert "uid 0 or 64, found" in refusal(KeyFileError, keyed.read_key, str(path), 0, SLURM)
    os.chown(path.parent, BOB, BOB)
    os.chown(path, 0, 0)
    assert "others can write in its directory" in refusal(KeyFileError, keyed.read_key, str(path), 0)


def test_no_key_is_shown() -> None:
    opened = agent().decode(made(agent()))
    ticket = root().issue_ticket(ALICE, JOB, 1)
    for shown in (repr(opened), repr(ticket), repr(agent()), repr(root())):
        assert repr(opened.secret) not in shown and repr(ticket.key) not in shown and repr(SITE) not in shown


def test_head_has_no_padding() -> None:
    assert keyed._HEAD.size == 4 + struct.calcsize(">BQIQ") + 4 + 4 + 8 + 16
