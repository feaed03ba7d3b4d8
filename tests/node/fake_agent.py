"""Stands in for `gemini_hpc.agent` in the prolog's tests: installed as its `__main__`, it behaves as the file
`fake_mode` beside it says at that moment, and writes down what it was given.

Modes: ok, hung (no longer answers `verdict?`), detach (keeps running after the epilog), silent, garbage, oversized,
refuse, hangup, exit, doubt and detach-doubt (its node is to be checked), ready JSON (what it answers), hold JSON (the
epilog is to hold the survivors of this restart), never (runs, but opens no socket), slow (opens its socket late),
moves (as detach; like the real one it finds the job's next directory).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from gemini_hpc.agent.own_directory import OwnDirectory
from gemini_hpc.node import privileges, spawn


def open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def told() -> str:
    return Path(__file__).with_name("fake_mode").read_text().strip()


def facts(directory: str) -> dict[str, object]:
    return {
        "argv": sys.argv[1:],
        "flags": {"isolated": sys.flags.isolated},
        "pid": os.getpid(),
        "session": os.getsid(0),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        "uids": os.getresuid(),
        "gids": os.getresgid(),
        "groups": sorted(os.getgroups()),
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "fds": open_files(),
        "mode": oct(os.stat(directory).st_mode & 0o7777),
        "traceable": privileges.is_traceable(),
    }


def write_map(directory: str, attach: dict[str, object]) -> None:
    """Reversed ranks on purpose, so that a test sees whose ranks are used."""
    from gemini_hpc.core.hostlist import expand

    hosts = list(expand(str(attach["nodelist"])))
    ranks = list(reversed(range(len(hosts))))
    own = ranks[hosts.index(str(attach["node"]))]
    text = (
        "GEMINI_MAP 1\n"
        f"job={attach['job']}\nrestart={attach['restart']}\nnodes={len(hosts)}\nnodelist={attach['nodelist']}\n"
        f"noderanks={','.join(map(str, ranks))}\nnoderank={own}\nmaster_addr={hosts[-1]}\nmaster_port=23456\n"
        f"socket={directory}/agent.sock\nagent_port=17004\nepoch=2\nhash=00ff\n"
    )
    fd = os.open(f"{directory}/map.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, text.encode())
    os.close(fd)
    os.rename(f"{directory}/map.new", f"{directory}/map")


def listening(path: str) -> socket.socket:
    if os.path.lexists(path):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(path)
    server.listen(4)
    server.settimeout(60)
    return server


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    directory = options["--dir"]
    spawn.drop_privileges(int(options["--uid"]), directory)
    if os.fork() == 0:  # as the real one's supervisor does
        os._exit(0)
    os.wait()
    mode = told()
    if mode == "exit":
        sys.exit("fake agent: exits on purpose")
    seen = facts(directory)
    if mode == "never":
        time.sleep(60)
    if mode == "slow":
        time.sleep(0.4)
    path = f"{directory}/agent.sock"
    own = OwnDirectory(directory, int(options["--uid"]))
    own.lock_directory()
    server = listening(path)
    if mode == "moves":
        server.settimeout(0.1)
    while True:
        try:
            peer, _ = server.accept()
        except TimeoutError:
            if mode == "moves" and own.check_directory() in ("moved", "silent"):
                server = listening(path)
                server.settimeout(0.1)
            elif mode != "moves":
                raise
            continue
        request = peer.recv(1 << 17)
        mode = told()
        if request and json.loads(request)["op"] == "verdict?":
            if mode == "hung":
                time.sleep(60)
            peer.send(b'{"op":"verdict"}')
            request = peer.recv(1 << 17)
        if not request:
            continue
        message = json.loads(request)
        with open(f"{directory}/record", "a") as f:
            f.write(json.dumps({"message": message, "agent": seen}) + "\n")
        reply: dict[str, object] = {"op": "ready", "state": "mapped"}
        if message["op"] == "epilog":
            keeps = mode.startswith("detach") or mode == "moves"
            reply = {"op": "ok", "state": "detached" if keeps else "released"}
            if mode.endswith("doubt"):
                reply["check"] = True
            if mode.startswith("hold "):
                reply = {"op": "ok", "state": "hold", "restart": json.loads(mode.removeprefix("hold "))}
        elif mode in ("ok", "detach", "moves", "hung") or mode.startswith("hold "):
            write_map(directory, message)
        if mode == "silent":
            time.sleep(60)
        elif mode == "garbage":
            peer.send(b"\xff\x00[[[[")
        elif mode == "oversized":
            peer.send(b'{"op":"ready","state":"' + b"x" * 100_000 + b'"}')
        elif mode == "refuse":
            peer.send(json.dumps({"op": "error", "error": "two\nlines\x1b[31m"}).encode())
        elif mode.startswith("ready "):
            peer.send(mode.removeprefix("ready ").encode())
        elif mode != "hangup":
            peer.send(json.dumps(reply).encode())
        if message["op"] == "epilog" and mode == "ok":
            os.unlink(path)
            return
        peer.close()


main()
