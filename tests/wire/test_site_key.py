"""A site without MUNGE: root's service issues tickets by the kernel's word, and an agent gets its keys by a pipe."""

from __future__ import annotations

import asyncio
import os
import pwd
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refusal

from gemini_hpc.config import ConfigError, Settings, parse_settings
from gemini_hpc.node import spawn, tickets
from gemini_hpc.wire import credentials, keyed, site_key
from gemini_hpc.wire.credentials import CredentialError

from .fake_munge import ALICE
from .test_keyed import CLUSTER, JOB, SITE, agent, key_of, made, root

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the service's answers are root's")
SETTINGS = Settings(auth="key", cluster_name=CLUSTER, slurm_user=pwd.getpwuid(os.geteuid()).pw_name)


@pytest.fixture(autouse=True)
def munge_afterwards() -> Iterator[None]:
    before = credentials.get_scheme()
    yield
    credentials.use(before)


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "etc" / "auth.key"
    keyed.make_key(str(path))
    path.write_bytes(SITE)
    monkeypatch.setattr(site_key, "KEY_PATH", str(path))
    return path


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Root's service on this host, where every user can reach it."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    path = str(directory / "tickets.sock")
    monkeypatch.setattr(site_key, "TICKETS_PATH", path)
    loop = asyncio.new_event_loop()
    task = loop.create_task(tickets.serve(root(), path))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    while not os.path.exists(path):
        assert thread.is_alive()
    yield path
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()
    os.unlink(path)
    directory.rmdir()


def test_the_setting() -> None:
    assert parse_settings('auth = "key"').auth == "key" and parse_settings("").auth == "munge"
    for other in ("slurm", "none", "", "MUNGE"):
        assert "auth: wanted munge or key" in refusal(ConfigError, parse_settings, f'auth = "{other}"'), other


@needs_root
def test_a_ticket_is_for_whom_the_kernel_names(service: str) -> None:
    ticket = site_key.fetch(JOB)
    assert (ticket.uid, ticket.job) == (os.getuid(), JOB)
    assert ticket.key == root().issue_ticket(os.getuid(), JOB, ticket.end_s).key


@needs_root
def test_another_user_gets_a_ticket_in_his_own_name(service: str) -> None:
    """Ask, as another process, for a job of any user; the key it gets is its own user's."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setresuid(ALICE, ALICE, ALICE)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(service)
                sock.sendall(site_key.ASK.pack(JOB))
                os.write(writer, sock.recv(site_key.TICKET.size))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        packed = pipe.read()
    ticket = keyed.Ticket(*site_key.TICKET.unpack(packed))
    assert ticket.uid == ALICE
    scheme = keyed.Tickets(lambda job: ticket, 64, ALICE)
    assert agent().decode(made(scheme)).uid == ALICE


@needs_root
def test_a_service_takes_the_place_of_another_without_a_refusal(tmp_path: Path) -> None:
    """Connect all the time: the name always leads to a socket that accepts."""
    path, started, left = str(tmp_path / "tickets.sock"), threading.Event(), threading.Event()

    async def start_services() -> None:
        tasks, inode = [], 0
        for _ in range(50):
            tasks.append(asyncio.create_task(tickets.serve(root(), path)))
            while not os.path.exists(path) or os.stat(path).st_ino == inode:
                await asyncio.sleep(0)
            inode = os.stat(path).st_ino
        started.set()
        await asyncio.to_thread(left.wait)
        for task in tasks:
            task.cancel()

    thread = threading.Thread(target=asyncio.run, args=[start_services()])
    thread.start()
    while not os.path.exists(path):
        assert thread.is_alive()
    try:
        while not started.is_set():
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
    finally:
        left.set()
        thread.join()


@needs_root
def test_callers_who_say_nothing_or_nonsense(service: str) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    for sock in silent:
        sock.connect(service)
        sock.send(b"\xff" * 3)
    assert site_key.fetch(0).job == 0
    for sock in silent:
        sock.close()


@needs_root
def test_others_wait_to_be_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_key, "TICKETS_PATH", str(tmp_path / "tickets.sock"))
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as before:
        busy.bind(site_key.TICKETS_PATH)
        busy.listen(0)
        before.connect(site_key.TICKETS_PATH)

        def serve() -> None:
            time.sleep(0.2)
            busy.accept()[0].close()
            caller, _ = busy.accept()
            (job,) = site_key.ASK.unpack(caller.recv(site_key.ASK.size))
            caller.sendall(site_key.TICKET.pack(0, job, 1, b"k" * 32))
            caller.close()

        threading.Thread(target=serve, daemon=True).start()
        assert site_key.fetch(JOB).job == JOB


def test_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_key, "TICKETS_PATH", str(tmp_path / "none.sock"))
    said = refusal(CredentialError, site_key.fetch, JOB)
    assert "no ticket for this user" in said and "\n" not in said


@needs_root
def test_a_service_that_is_not_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tickets.sock"
    monkeypatch.setattr(site_key, "TICKETS_PATH", str(path))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        os.seteuid(ALICE)
        try:
            sock.listen()  # the kernel notes who listens
        finally:
            os.seteuid(0)
        assert f"uid {ALICE} listens" in refusal(CredentialError, site_key.fetch, JOB)


def test_the_agent_takes_its_keys_from_the_pipe(key_file: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, site_key.pack(SETTINGS, ALICE, [JOB, 8]))
    os.close(writer)
    site_key.choose_scheme(reader, ALICE)
    for job in (JOB, 8):
        assert credentials.decode(made(agent(job), job=job)).payload == b"x"
    assert refusal(CredentialError, credentials.decode, made(agent(9), job=9))


@pytest.mark.parametrize("packed", [b"", bytes(39), bytes(41), bytes(121)])
def test_pipes_without_keys(packed: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, packed)
    os.close(writer)
    assert "that are no keys" in refusal(CredentialError, site_key.choose_scheme, reader, ALICE)
    assert "no key" in refusal(CredentialError, site_key.choose_scheme, reader, ALICE)


@needs_root
def test_a_daemon_gets_the_pipe_and_nothing_else(tmp_path: Path) -> None:
    """Neither arguments nor environment contain the key."""
    out = tmp_path / "out"
    code = (
        "import os, sys; key = os.read(3, 100); rest = [n for n in map(int, os.listdir('/proc/self/fd')) if n > 3];"
        f"seen = open('/proc/self/cmdline', 'rb').read() + open('/proc/self/environ', 'rb').read();"
        f"open({str(out)!r}, 'w').write(repr((key.hex(), key in seen or key.hex().encode() in seen, len(rest))))"
    )
    reader, writer = os.pipe()
    os.write(writer, key_of())
    os.close(writer)
    process = spawn.start_daemon([sys.executable, "-I", "-c", code], lambda pid: None, reader)
    os.close(reader)
    assert select.select([process], [], [], 20)[0]
    os.close(process)
    assert out.read_text() == repr((key_of().hex(), False, 1))  # the one lists the directory


def test_commands_of_root_read_the_key_file(key_file: Path) -> None:
    site_key.adopt(Settings())
    assert credentials.get_scheme().name == "munge"
    site_key.adopt(SETTINGS)
    assert credentials.get_scheme().name == "key"


@needs_root
@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_key_file_that_others_can_read_is_not_used(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert f"wanted mode 0600, found {mode:04o}" in refusal(CredentialError, site_key.adopt, SETTINGS)
    assert refusal(keyed.KeyFileError, site_key.pack, SETTINGS, ALICE, [JOB])
    assert credentials.get_scheme().name == "munge"
