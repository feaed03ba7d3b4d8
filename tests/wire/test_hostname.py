"""Nodes whose names the resolver takes for numbers are dialled by their names."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc.wire.hostname import is_numeric_hostname, resolve_hostname


def test_a_name_that_the_resolver_takes_for_a_number() -> None:
    for name in ("0123", "77", "10.1", "0x1f", "010.0.0.1", "1.2.3.04"):
        assert socket.inet_aton(name) and is_numeric_hostname(name), name


def test_other_names_and_addresses_are_left_alone() -> None:
    for name in ("n1", "10.0.0.1", "127.0.0.1", "0123-ib0", "a0", "localhost", "::1", "fe80::1", ""):
        assert not is_numeric_hostname(name) and resolve_hostname(name) == name, name


def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(OSError, match="host 0123456 has no address"):
        resolve_hostname("0123456")


DIAL = """
import asyncio, socket
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import probe_port
from gemini_hpc.wire.handshake import Caller, HandshakeClient, HandshakeError
from gemini_hpc.wire.link import connect

async def main():
    there = []
    async def served(reader, writer):
        there.append(writer.get_extra_info("sockname")[0])
        await reader.read()
        writer.close()
    server = await asyncio.start_server(served, "127.0.0.23")
    port = server.sockets[0].getsockname()[1]
    assert await probe_port("0123", port) is Port.ANSWERS
    client = HandshakeClient(Caller("c", "a", "x"), purpose="peer", job=1, target="0123", server_uid=0)
    try:
        await connect("0123", port, client, 5.0)
    except (OSError, HandshakeError, TimeoutError):
        pass
    assert there == ["127.0.0.23"] * 2, there

asyncio.run(main())
"""


@pytest.mark.slow
def test_probes_and_links_reach_a_node_of_such_a_name(tmp_path: Path) -> None:
    """In a mount namespace with a hosts file that knows it."""
    hosts, program = tmp_path / "hosts", tmp_path / "dial.py"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.23 login 0123 # of the cluster\n")
    program.write_text(DIAL)
    shell = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} {program}"
    argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", shell]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
