"""The start of a job's own agent on one node, where no prolog does it: `python -P -m gemini_hpc.agent.own_start`.

`gemini-hpc run --own-agents` starts it as an overlapping step of the job, one task a node. It reads the job's key
from its file, hands it to the agent through a pipe, and announces the incarnation as a prolog does. It prints one
line, `NODE STATE TEXT`. The end of its input, after the exit status of the job's command, is the job's end on this
node. So is SIGTERM, with which Slurm ends a job. The agent itself takes no signal, since it may have to save to the
tier.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import stat
import sys
from contextlib import suppress

import msgspec

from gemini_hpc import clock, lines
from gemini_hpc.agent.own_directory import SOCKET
from gemini_hpc.config import build_own_settings
from gemini_hpc.node import ask_agent, spawn
from gemini_hpc.wire import keyed, local, site_key

MAPPED, UNMAPPED, FAILED = "mapped", "unmapped", "failed"
START_S = 20.0  # an agent starts within a second; an interpreter on a slow shared file system takes longer
POLL_S = 0.02  # pause between two attempts to connect to a starting agent
GRACE_S = 10.0  # the agent ends by itself after its last save; a node at its limits may take longer
_KILLED = "0:15"
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


class StartError(Exception):
    """An agent that could not be started; the text is one line."""


def main(argv: list[str] | None = None) -> int:
    """Start the agent, attend it to the job's end, and return the exit status."""
    args = _parse_arguments(argv)
    for number in _IGNORED:  # `scancel --signal` and `sbatch --signal` reach every step of a job
        signal.signal(number, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        _make_directory(args.directory)
        agent = _start(args, keyed.read_key(args.key_file, os.geteuid()))
    except (StartError, keyed.KeyFileError, OSError) as exc:
        _report_node(args.node, FAILED, f"{exc}")
        return 1
    process = os.pidfd_open(agent)
    try:
        _report_node(args.node, *_attach(args, process))
        code = _wait(reader, process)
        _end_agent(args, process, code)
    except (StartError, ask_agent.ListenerError) as exc:
        _report_node(args.node, FAILED, f"{exc}{_read_last_line(args.directory)}")
        return 1
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        shutil.rmtree(args.directory, ignore_errors=True)
    return 0


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gemini_hpc.agent.own_start", description="A job's own agent on a node.")
    parser.add_argument("--job", type=int, required=True, help="raw Slurm job id")
    parser.add_argument("--restart", type=int, required=True, help="restart count of the job")
    parser.add_argument("--nodelist", required=True, help="the job's nodes as a Slurm host list")
    parser.add_argument("--replicas", type=int, required=True, help="copies of each shard")
    parser.add_argument("--spares", type=int, required=True, help="number of spare nodes")
    parser.add_argument("--cluster", required=True, help="Slurm's name of the cluster")
    parser.add_argument("--directory", required=True, help="the agent's directory, made here")
    parser.add_argument("--key-file", required=True, help="the file with the job's key")
    parser.add_argument("--share-bytes", type=int, required=True, help="the most that copies may take on a node")
    parser.add_argument("--share", required=True, help="the share in words")
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME", ""), help="this node's name in Slurm")
    return parser.parse_args(argv)


def _report_node(node: str, state: str, text: str = "") -> None:
    lines.put(sys.stdout, f"{node} {state} {text.splitlines()[0] if text else ''}".rstrip() + "\n")


def _make_directory(path: str) -> None:
    """Make the agent's directory, or take the one that a killed incarnation of the job has left.

    Raises:
        StartError: Another user's file is in the way.
        OSError: The directory cannot be made.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise StartError(f"{path}: wanted a directory of this user alone")
    for name in os.listdir(path):
        os.unlink(f"{path}/{name}")


def _start(args: argparse.Namespace, key: bytes) -> int:
    """Start the agent with its key, and return its pid."""
    argv = [sys.executable, "-P", "-m", "gemini_hpc.agent", "--own", "--keys"]
    argv += ["--job", str(args.job), "--uid", str(os.geteuid()), "--node", args.node, "--dir", args.directory]
    argv += ["--share-bytes", str(args.share_bytes), "--share", args.share]
    reader, writer = os.pipe()
    os.write(writer, site_key.pack_key(args.job, key))  # fits into the pipe
    os.close(writer)
    pid = os.fork()
    if pid == 0:
        try:
            _become(argv, reader, args.directory)
        finally:
            os._exit(127)
    os.close(reader)
    return pid


def _become(argv: list[str], keys: int, directory: str) -> None:
    os.umask(0o077)
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    spawn.redirect_output(f"{directory}/{spawn.LOG_NAME}")
    os.dup2(keys, spawn.HANDED)
    os.set_inheritable(spawn.HANDED, True)
    os.closerange(spawn.HANDED + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execv(argv[0], argv)


def _attach(args: argparse.Namespace, process: int) -> tuple[str, str]:
    """Announce the incarnation, and return whether the agents agree on the map, with the nodes that do not answer.

    Raises:
        StartError: The agent has ended, or does not listen in time.
        ListenerError: The agent refuses.
    """
    message = local.Attach(
        job=args.job,
        restart=args.restart,
        nodelist=args.nodelist,
        node=args.node,
        replicas=args.replicas,
        spares=args.spares,
        key=keyed.derive_tier_id(keyed.read_key(args.key_file, os.geteuid())),
        cluster=args.cluster,
    )
    deadline = clock.monotonic() + START_S
    while True:
        try:
            with ask_agent.connect(args.directory, os.geteuid(), deadline) as sock:
                answer = ask_agent.ask(
                    sock, msgspec.to_builtins(message), deadline + build_own_settings().attach_timeout_s
                )
            absent = answer.get("absent") or []
            return (MAPPED, "") if answer.get("state") == MAPPED else (UNMAPPED, " ".join(map(str, absent)))
        except ask_agent.NobodyAnswersError:
            if select.select([process], [], [], POLL_S)[0]:
                raise StartError("the agent ended at once") from None
            if clock.monotonic() > deadline:
                raise StartError(f"the agent did not open {args.directory}/{SOCKET} in time") from None


def _wait(signals: int, process: int) -> str:
    """Wait for the job's end on this node, and return the exit code for the agent.

    Raises:
        StartError: The agent has ended before.
    """
    exit_code = b""
    while True:
        ready = select.select([0, signals, process], [], [])[0]
        if signals in ready:
            return _KILLED
        if 0 in ready:
            part = os.read(0, 64)
            if not part:
                return exit_code.decode(errors="replace").strip() or _KILLED
            exit_code += part
        elif process in ready:
            raise StartError("the agent has ended")


def _end_agent(args: argparse.Namespace, process: int, code: str) -> None:
    """Tell the agent that the job has ended here, and wait until it has ended, too."""
    message = local.Epilog(job=args.job, restart=args.restart, exit_code=code)
    deadline = clock.monotonic() + GRACE_S
    try:
        with ask_agent.connect(args.directory, os.geteuid(), deadline) as sock:
            ask_agent.ask(sock, msgspec.to_builtins(message), deadline)
    except ask_agent.NobodyAnswersError:
        pass  # it is ending already
    select.select([process], [], [], build_own_settings().tier_flush_s + GRACE_S)


def _read_last_line(directory: str) -> str:
    """Return the last line of the agent's log."""
    try:
        with open(f"{directory}/{spawn.LOG_NAME}", encoding="utf-8", errors="replace") as log:
            words = log.read(1 << 16).split("\n")
    except OSError:
        return ""
    last = [word for word in words if word.strip()][-1:]
    return f": {last[0][:300]}" if last else ""


if __name__ == "__main__":
    sys.exit(main())
