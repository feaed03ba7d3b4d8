"""Noise on every port, and users, jobs, hosts and sessions that are not what they say."""

from __future__ import annotations

import time

import pytest

from .conftest import NOBODY, PYTHON, Site, Steady, at_most_one_a_second, complaints, turned_away

pytestmark = pytest.mark.cluster

HANDSHAKE_S = 5.0


@pytest.mark.parametrize("whose", ["agent", "controller"])
def test_noise_before_the_handshake(site: Site, whose: str) -> None:
    call = site.call() if whose == "agent" else site.controller_call()
    with Steady(site):
        took = site.attack("noise", **call, idle=150)
    at_once = {k: v for k, v in took.items() if k not in ("silent", "slow", "http", "garbage")}
    assert max(at_once.values()) < 4.0, took
    assert max(took.values()) < HANDSHAKE_S + 4.0, took
    assert site.gemini("inspect", str(site.job.id)).returncode == 0
    at_most_one_a_second(complaints(site.agent_log()))
    at_most_one_a_second(turned_away(site.controller_log()))


@pytest.mark.witness("another user is served by no agent")
def test_another_user_is_not_served(site: Site) -> None:
    purposes = {p: {"purpose": p} for p in ("link", "pull", "inventory", "wake", "query", "control", "", "root")}
    for user in ("bob", "nobody"):
        with Steady(site):
            answers = site.attack("call", user, calls=purposes)
        assert set(answers.values()) == {"HandshakeError: refused: the job belongs to another user"}, (user, answers)
    at_most_one_a_second(complaints(site.agent_log()))


def test_heirs_that_are_none(site: Site) -> None:
    """Who says that his job takes over what this one has left: of another user, too early, or for something else."""
    other = site.job.id + 1
    reads = {p: {"purpose": p, "successor": other} for p in ("inventory", "pull", "taken")}
    more = {p: {"purpose": p, "successor": other} for p in ("link", "push", "wake", "control", "")}
    with Steady(site):
        early = site.attack("call", "alice", calls=reads)
        others = site.attack("call", "alice", calls=more | {"itself": {"purpose": "pull", "successor": site.job.id}})
        bobs = site.attack("call", "bob", calls=reads | more)
    assert set(early.values()) == {"HandshakeError: refused: the job still runs"}, early
    assert set(others.values()) == {"HandshakeError: refused: not from a node of this job, as this agent knows it"}, (
        others
    )
    assert set(bobs.values()) == {"HandshakeError: refused: the job belongs to another user"}, bobs


def test_root_may_ask_and_nothing_else(site: Site) -> None:
    answers = site.attack(
        "call", None, calls={p: {"purpose": p} for p in ("link", "pull", "inventory", "wake", "query", "control")}
    )
    assert answers.pop("query") == "ok"
    assert set(answers.values()) == {"HandshakeError: refused: the job belongs to another user"}, answers


def test_credentials_about_something_else(site: Site) -> None:
    first, second = site.nodes
    calls = {
        "as it should be": {"purpose": "query"},
        "job": {"job": site.job.id + 1},
        "cluster": {"cluster": "another"},
        "host": {"target": second},
        "restart": {"restart": 1},
        "an older restart": {"restart": 1 << 31},
        "not of the job": {"source": "n4" if "n4" not in site.nodes else "n1"},
        "itself": {"source": first},
        "path": {"source": "../../etc"},
        "purpose": {"purpose": "control"},
    }
    answers = site.attack("call", "alice", calls=calls)
    assert answers.pop("as it should be") == "ok"
    expected = {
        "job": "this is job",
        "cluster": "this is job",
        "host": "this is job",
        "restart": "this agent is at restart 0",
    }
    expected |= {"an older restart": "this agent is at restart 0"}
    for name, answer in answers.items():
        assert answer.startswith(f"HandshakeError: refused: {expected.get(name, 'not from a node of this job')}"), (
            answers
        )
    answers = site.attack("call", "alice", **site.controller_call(), calls={"cluster": {"cluster": "another"}})
    assert "this is the controller of cluster" in answers["cluster"]


@pytest.mark.witness("a stolen or repeated credential opens nothing")
def test_stolen_and_replayed_greetings(site: Site) -> None:
    for call, purpose in ((site.call(), "query"), (site.controller_call(), "query")):
        taken = site.attack("greeting", "alice", **(call | {"purpose": purpose}))
        answers = site.attack("steal", "bob", **call, hex=taken["hex"])
        assert answers["first"].endswith("; then closed"), answers
        assert answers["second"] == "closed", "MUNGE knows this one"


def test_good_credentials_with_bad_content(site: Site) -> None:
    for call in (site.call(), site.controller_call()):
        answers = site.attack("forged", "alice", **call)
        # Requirement not-a-failure: who may speak to us at all, but in no version of ours, is told so.
        assert answers.pop("protocol").startswith("refused: protocol 99, wanted 4:"), answers
        assert set(answers.values()) == {"closed"}, answers


@pytest.mark.parametrize("whose", ["agent", "controller"])
def test_frames_of_a_session_that_were_touched(site: Site, whose: str) -> None:
    call = site.call() | {"purpose": "query"} if whose == "agent" else site.controller_call()
    with Steady(site):
        answers = site.attack("sessions", "alice", **call, ask="inspect" if whose == "agent" else "job")
    assert answers.pop("good") == "answered", answers
    assert set(answers.values()) == {"closed"}, answers
    assert whose == "agent" or {"repeated", "reflected"} <= answers.keys()


def test_peers_that_talk_nonsense(site: Site) -> None:
    """From the owner's own uid, in the place of a real peer, which is soon back."""
    answers = site.attack("link", "alice")
    assert "JobAnswer" not in answers.values(), answers
    site.goes_on(10)


def test_refusals_are_logged_once_a_second(site: Site) -> None:
    before, lines = len(complaints(site.agent_log())), len(site.controller_log().splitlines())
    count = site.attack("spam", "bob", seconds=4)["count"]
    site.attack("spam", "bob", seconds=2, **site.controller_call() | {"cluster": "another"})
    assert count > 30
    times = complaints(site.agent_log())
    at_most_one_a_second(times)
    assert 2 <= len(times) - before <= 8
    assert len(site.controller_log().splitlines()) - lines < 20
    events = [e["name"] for e in site.job.events()]
    assert "complaint" not in events, "strangers do not write into the job's event log"


def test_local_socket_is_the_owners(site: Site) -> None:
    node, directory = site.nodes[0], f"/run/gemini-hpc/{site.job.id}"
    path = f"{directory}/agent.sock"
    for user in ("bob", "nobody"):
        assert site.attack("local_socket", user, node, path=path, times=1) == {"answers": ["Permission denied"]}
    # If the file system did not keep them out, the credentials of the socket would.
    cluster = site.cluster
    try:
        cluster.exec(node, ["chmod", "0711", directory])
        cluster.exec(node, ["chmod", "0666", path])
        with Steady(site):
            answers = site.attack("local_socket", "bob", node, path=path, times=30)["answers"]
        assert set(answers) <= {"closed", "Broken pipe", "Connection reset by peer"}, answers
        good = site.attack("local_socket", "alice", node, path=path, times=1)["answers"]
        assert '"op":"verdict"' in good[0]
    finally:
        cluster.exec(node, ["chmod", "0700", directory])
        cluster.exec(node, ["chmod", "0600", path])
    log = site.agent_log()
    assert "local client of uid 5002 turned away" in log
    at_most_one_a_second(complaints(log))


def test_munged_hangs_and_dies(site: Site) -> None:
    """Established links need no MUNGE; handshakes that wait for it hold up nothing else."""
    cluster = site.cluster
    pid = cluster.run(["cat", "/run/munge/munged.pid"]).stdout.strip()
    argv = cluster.run(["cat", f"/proc/{pid}/cmdline"]).stdout.rstrip("\0").split("\0")
    hello = (
        "import socket, struct, sys, time; s = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) "
        "for _ in range(40)]; [x.sendall(bytes.fromhex(sys.argv[3])) for x in s]; print('sent', flush=True); "
        "time.sleep(4)"
    )
    greeting = b"\x81\xaacredential\xc4\x10MUNGE:AwQFAAAA:x"
    frame = len(greeting).to_bytes(4, "big") + greeting
    address = site.cluster.find_address(site.nodes[0])
    cluster.run(["kill", "-STOP", pid])
    try:
        waiting = cluster.start_command([PYTHON, "-I", "-c", hello, address, str(site.port), frame.hex()], user="bob")
        assert waiting.stdout is not None and waiting.stdout.readline() == "sent\n"
        now, began = site.sealed(), time.monotonic()
        site.goes_on(20, 10)
        assert time.monotonic() - began < 8, f"{site.sealed() - now} versions"
        waiting.wait(15)
    finally:
        cluster.run(["kill", "-CONT", pid])
    cluster.run(["kill", pid])
    try:
        time.sleep(0.5)
        site.goes_on(20, 10)
        began = time.monotonic()
        done = site.gemini("inspect", str(site.job.id))
        assert done.returncode == 1 and "Traceback" not in done.stderr, done
        assert len(done.stderr.splitlines()) == 1 and "munge" in done.stderr.lower(), done.stderr
        assert time.monotonic() - began < 15
    finally:
        cluster.run(["rm", "-f", "/run/munge/munge.socket.2", "/run/munge/munged.pid"])
        started = cluster.run(argv)
    assert started.returncode == 0, started
    assert site.gemini("inspect", str(site.job.id)).returncode == 0
    assert NOBODY == 65534
