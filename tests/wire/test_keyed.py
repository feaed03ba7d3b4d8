"""Credentials by shared keys: who may make and open them, and what a thief of one, or of a key file, gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from refusals import refusal

from gemini_hpc.wire import credentials, handshake, keyed
from gemini_hpc.wire.credentials import Scheme
from gemini_hpc.wire.frames import LENGTH_BYTES, Sealer
from gemini_hpc.wire.handshake import HandshakeError, LinkSession
from gemini_hpc.wire.keyed import JobKeys, KeyFileError, SiteKey

from .fake_munge import ALICE, BOB, client

SLURM, CLUSTER, JOB = 64, "c", 7
SITE = bytes(range(32))


def key_of(job: int = JOB, uid: int = ALICE) -> bytes:
    return keyed.job_key(keyed.user_key(SITE, CLUSTER, uid), job)


def agent(job: int = JOB, uid: int = ALICE) -> JobKeys:
    return JobKeys({job: key_of(job, uid)}, uid)


def controller(key: bytes = SITE, cluster: str = CLUSTER) -> SiteKey:
    return SiteKey(key, cluster, SLURM, SLURM)


@contextmanager
def using(scheme: Scheme) -> Iterator[None]:
    before = credentials.use(scheme)
    try:
        yield
    finally:
        credentials.use(before)


def meet(caller: Scheme, server: Scheme, **changes: object) -> tuple[LinkSession, LinkSession]:
    calling = client(**changes)
    with using(caller):
        greeting = calling.greeting()
    with using(server):
        opened = handshake.receive(greeting)
        reply, theirs = handshake.answer(opened, host="n2", restart=1, instance="i2")
    with using(caller):
        ours = calling.finish(reply)
    frame = Sealer(ours.send_key).seal(b"x")[LENGTH_BYTES:]
    assert Sealer(theirs.receive_key).open(frame) == b"x"
    frame = Sealer(theirs.send_key).seal(b"y")[LENGTH_BYTES:]
    assert Sealer(ours.receive_key).open(frame) == b"y"
    return ours, theirs


def test_agents_of_a_job_meet() -> None:
    ours, theirs = meet(agent(), agent())
    assert (ours.peer_uid, theirs.peer_uid) == (ALICE, ALICE)


def test_a_thief_of_both_greetings_has_no_session_key() -> None:
    """Everything on the wire is readable; the keys follow from the job's key as well."""
    caller, server = client(), agent()
    with using(agent()):
        greeting = caller.greeting()
    with using(server):
        opened = handshake.receive(greeting)
        reply, session = handshake.answer(opened, host="n2", restart=1, instance="i2")
    assert opened.hello.share in greeting and opened.hello.nonce in greeting
    with using(agent()):
        share = handshake._answer.decode(handshake._open(reply).payload).share
    for secret in (b"", bytes(32), key_of(8), key_of(uid=BOB)):
        assert handshake._keys(opened.hello, share, secret) != (session.receive_key, session.send_key)


def test_replayed_greeting() -> None:
    server = agent()
    with using(agent()):
        greeting = client().greeting()
    with using(server):
        handshake.receive(greeting)
        with pytest.raises(HandshakeError, match="key: replayed credential"):
            handshake.receive(greeting)


def test_job_key_file(tmp_path: Path) -> None:
    path = tmp_path / "own" / "key"
    made = keyed.make_key(str(path))
    assert keyed.read_key(str(path), os.getuid()) == made and len(made) == keyed.KEY_BYTES
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert "exists" in refusal(KeyFileError, keyed.make_key, str(path))
    meet(JobKeys({JOB: made}, ALICE), JobKeys({JOB: keyed.read_key(str(path), os.getuid())}, ALICE))
