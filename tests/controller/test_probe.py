"""What a probe may call silence, and what only says that the controller itself could not ask."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import ProbeHistory, ProbeResult, Target
from gemini_hpc.controller.reach import Reachability
from gemini_hpc.controller.registry import Registry
from gemini_hpc.slurm.text import parse_node

V4, V6 = "10.1.2.3", "fd00::3"


def fails_with(monkeypatch: pytest.MonkeyPatch, errors: dict[str, int]) -> None:
    """Connects end in these errors, by address; without one they take for ever."""

    async def connect(host: str, port: int) -> NoReturn:
        await asyncio.sleep(0.0 if host in errors else 60.0)
        raise OSError(errors[host], "scripted")

    monkeypatch.setattr(asyncio, "open_connection", connect)


def resolves(monkeypatch: pytest.MonkeyPatch, *addresses: str, after_s: float = 0.0) -> None:
    """The resolver, as a thread sees it. No address: it fails."""

    def answer(host: str, port: int, *args: Any, **more: Any) -> list[Any]:
        time.sleep(after_s)
        if not addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        kind = {False: socket.AF_INET, True: socket.AF_INET6}
        return [(kind[":" in a], socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_only_the_silence_of_the_other_side_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[int, Port]] = [
        (errno.EMFILE, Port.UNKNOWN),
        (errno.ENOBUFS, Port.UNKNOWN),
        (errno.EADDRNOTAVAIL, Port.UNKNOWN),
        (errno.ENETUNREACH, Port.UNKNOWN),
        (errno.ENETDOWN, Port.UNKNOWN),
        (errno.EPERM, Port.UNKNOWN),
        (errno.EHOSTUNREACH, Port.SILENT),
        (errno.ETIMEDOUT, Port.SILENT),
        (errno.ECONNREFUSED, Port.REFUSES),
    ]
    for case in cases:
        error, port = case
        fails_with(monkeypatch, {V4: error})
        assert asyncio.run(probe.probe_port(V4, 7)) is port, case
        found = asyncio.run(probe.probe_node(Target(V4, 7, (8,), range(9, 12))))
        assert {found.slurmd, found.agent, found.kernel} == {port}, case


def test_a_connect_that_takes_too_long_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, {})
    assert asyncio.run(probe.probe_port(V4, 7, 0.05)) is Port.SILENT


def test_a_name_that_does_not_resolve_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch)
    assert asyncio.run(probe.probe_port("n2", 7)) is Port.UNKNOWN
    found = asyncio.run(probe.probe_node(Target("n2", 7, (8,), range(9, 12))))
    assert {found.slurmd, found.agent, found.kernel} == {Port.UNKNOWN}


def test_a_slow_resolver_takes_nothing_from_the_time_of_the_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    resolves(monkeypatch, "127.0.0.1", after_s=2 * probe.CONNECT_TIMEOUT_S)
    monkeypatch.setattr(probe, "ANSWER_TIMEOUT_S", 0.1)
    assert asyncio.run(probe.probe_port("n2", port)) is Port.HANGS
    found = asyncio.run(probe.probe_node(Target("n2", port, (port,), range(port, port + 1))))
    assert found.slurmd is Port.HANGS and found.after_s >= 2 * probe.CONNECT_TIMEOUT_S
    server.close()
    seen = ProbeHistory()
    seen.add_result(ProbeResult(Port.SILENT, Port.SILENT, Port.SILENT, 0.8), time.monotonic() - 1.0)
    assert 0.1 < seen.silent_s < 0.8, "nobody was asked before the name was resolved"


def test_a_resolver_that_does_not_answer_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RESOLVE_TIMEOUT_S", 0.1)
    resolves(monkeypatch, "127.0.0.1", after_s=0.5)
    assert asyncio.run(probe.probe_port("n2", 7)) is Port.UNKNOWN


def test_each_address_of_a_node_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, V6, V4)
    fails_with(monkeypatch, {V6: errno.ENETUNREACH, V4: errno.EHOSTUNREACH})
    assert asyncio.run(probe.probe_port("n2", 7)) is Port.SILENT, "this host has no IPv6"
    fails_with(monkeypatch, {V6: errno.EHOSTUNREACH, V4: errno.ECONNREFUSED})
    assert asyncio.run(probe.probe_port("n2", 7)) is Port.REFUSES
    fails_with(monkeypatch, {V6: errno.EHOSTUNREACH, V4: errno.EMFILE})
    assert asyncio.run(probe.probe_port("n2", 7)) is Port.UNKNOWN


def test_where_nobody_was_asked_silence_is_counted_anew() -> None:
    silent, unknown = (ProbeResult(p, p, p) for p in (Port.SILENT, Port.UNKNOWN))
    seen, now = ProbeHistory(), time.monotonic()
    seen.add_result(silent, now - 6)
    assert seen.silent_s >= 6 and seen.agent_silent_s >= 6
    seen.add_result(unknown, now - 3)
    assert seen.silent_s == seen.agent_silent_s == 0.0 and seen.slurmd_silent_s >= 6
    assert {seen.judge_port(what) for what in probe.PORTS} == {Port.UNKNOWN}
    seen.add_result(silent, now - 1)
    assert 1 <= seen.silent_s < 3 and {seen.judge_port(what) for what in probe.PORTS} == {Port.SILENT}
    seen.add_result(ProbeResult(Port.ANSWERS, Port.ANSWERS, Port.ANSWERS), now)
    seen.add_result(unknown, now)
    assert seen.judge_port("slurmd") is Port.ANSWERS, "a sign of life is a veto for a while"


@pytest.mark.parametrize("port", [Port.SILENT, Port.UNKNOWN, Port.HANGS, Port.ANSWERS])
def test_before_somebody_is_fenced_nodes_that_agents_vouch_for_are_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: Port
) -> None:
    nodes = {n: parse_node(f"NodeName={n} NodeAddr={n} State=IDLE") for n in (f"n{i}" for i in range(20))}
    registry, asked = Registry(str(tmp_path)), list[int]()
    monkeypatch.setattr(registry, "is_vouched", lambda host: host != "n0")

    async def reached(targets: dict[str, tuple[str, int]]) -> dict[str, Port]:
        asked.append(len(targets))
        return {n: Port.ANSWERS if n == "n0" else port for n in targets}

    monkeypatch.setattr(probe, "probe_ports", reached)

    async def work() -> None:
        reach = Reachability(Settings(), registry)
        await reach.probe_members(nodes, {"n9"}, nodes)
        assert (reach.reached, reach.asked) == (19, 19)
        await reach.probe_members(nodes, {"n9"}, nodes, must_be_fresh=True)
        # A kernel that accepts is reached, whatever its slurmd does.
        sure = (1 if port in (Port.SILENT, Port.UNKNOWN) else 19, 19)
        assert (reach.reached, reach.asked) == sure
        for again in (False, True):
            await reach.probe_members(nodes, {"n9"}, nodes, must_be_fresh=again)
        assert (reach.reached, reach.asked) == sure and asked == [1, 5], "good for a moment"

    asyncio.run(work())
