"""The supervisor of an agent: `python3 -I -m gemini_hpc.agent`, started by the prolog as root.

All arguments come from the prolog alone. The process first becomes the job's owner, for good. The new owner cannot
trace a process that has given up root after it was executed. From then on no process here executes a program. Where
no site has installed a prolog, `agent.own_start` starts it as the job's owner, with SIGTERM ignored.

The started process stays as a small supervisor. When the agent proper dies, the supervisor starts it again, a bounded
number of times. The supervisor also forks the agent's workers. After a restart, trainers hand their memory back to
the new agent.

SIGTERM to the supervisor ends both, as at the node's shutdown. Sent to the agent alone, it is a death like others.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import select
import signal
import sys
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.agent.tier import workers
from gemini_hpc.config import ConfigError, Settings, build_own_settings, load_site_settings
from gemini_hpc.node import oom, privileges, spawn

_SETTLED_S = 60.0  # an agent that has run for so long does not die of its start: its deaths are counted anew


def _block_openssl() -> None:
    # The agent speaks no TLS and hashes with blake2b and xxh3: OpenSSL would be a sixth of its memory.
    sys.modules.update(dict.fromkeys(("ssl", "_ssl", "_hashlib")))  # type: ignore[arg-type]


def _run_agent(settings: Settings, args: argparse.Namespace, again: bool, channel: workers.SupervisorChannel) -> int:
    _block_openssl()
    gc.disable()  # imports create no garbage, and every job waits for them
    from gemini_hpc.agent.daemon import serve
    from gemini_hpc.agent.peers.identity import AgentIdentity
    from gemini_hpc.agent.tier import worker_process

    gc.freeze()
    gc.enable()
    worker_process.use(channel)
    identity = AgentIdentity(settings, args.job, args.uid, args.node, args.dir, again)
    return serve(identity, (args.share_bytes, args.share))


def _supervise(settings: Settings, args: argparse.Namespace, score: oom.OwnScore) -> int:
    # A shard takes two descriptors, a client one. slurmd's limit (often 1024) is meant for programs with select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    deaths, asked = 0, _watch_for_sigterm()
    while True:
        started = clock.monotonic()
        tier_workers = workers.Workers(workers.run_tier_worker, score.fork)
        pid = score.fork()
        if pid == 0:
            status = 1
            try:
                _leave_sigterm()
                tier_workers.sock.close()
                status = _run_agent(settings, args, deaths > 0, workers.SupervisorChannel(tier_workers.theirs))
            except SystemExit as exc:
                print(exc, file=sys.stderr, flush=True)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        tier_workers.theirs.close()
        status = _attend(pid, tier_workers, asked)
        tier_workers.close()
        if status == 0:
            return 0
        deaths = 1 if clock.monotonic() - started > _SETTLED_S else deaths + 1
        # The signal may reach this process a moment after the agent, which has died of it.
        is_asked = bool(select.select([asked], [], [], 0.05 * deaths)[0])
        is_last = is_asked or deaths > settings.agent_restarts or not _is_there(args.dir, args.uid)
        how = "ended by SIGTERM" if is_asked else f"died (status {status}, death {deaths})"
        follows = f"no other follows, and the job is not protected on {args.node}" if is_last else "starting another"
        with suppress(OSError):  # the job's directory may be full
            print(f"gemini-hpc: agent of job {args.job} {how}: {follows}", file=sys.stderr, flush=True)
        if is_last:
            return 1  # root has removed the job's directory, so no process could reach another agent


def _watch_for_sigterm() -> int:
    """Return a descriptor that is readable from SIGTERM on; never where the starter has had SIGTERM ignored."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
    return reader


def _leave_sigterm() -> None:
    """Die of SIGTERM in the agent, unless the starter has had SIGTERM ignored."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def _is_there(directory: str, uid: int) -> bool:
    try:
        return os.stat(directory, follow_symlinks=False).st_uid == uid
    except OSError:
        return False


def _attend(agent: int, tier_workers: workers.Workers, asked: int) -> int:
    """Fork workers until the agent has ended, and return its status. End the agent once `asked` is readable."""
    process = os.pidfd_open(agent)
    try:
        listens, is_asked = True, False
        while True:
            wanted = [process, *tier_workers.list_pidfds(), *([tier_workers.sock.fileno()] if listens else [])]
            wanted += [] if is_asked else [asked]
            poll = select.poll()
            for fd_wanted in wanted:
                poll.register(fd_wanted, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if asked in ready:
                is_asked = True
                signal.pidfd_send_signal(process, signal.SIGKILL)
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] == agent:
                    return child[1]
                tier_workers.close_pidfd(child[0])
            if listens and tier_workers.sock.fileno() in ready:
                listens = tier_workers.serve()
    finally:
        os.close(process)


def _take_keys(uid: int) -> None:
    _block_openssl()
    from gemini_hpc.wire import credentials, site_key

    try:
        site_key.choose_scheme(spawn.HANDED, uid)
    except credentials.CredentialError as exc:
        raise ValueError(str(exc)) from None


def main() -> int:
    """Supervise one agent and return the exit status."""
    parser = argparse.ArgumentParser(prog="gemini_hpc.agent", description="Node-resident agent of one job.")
    parser.add_argument("--job", type=int, required=True, help="raw Slurm job id")
    parser.add_argument("--uid", type=int, required=True, help="uid of the job's owner; root switches to this uid")
    parser.add_argument("--node", required=True, help="this node's name in Slurm")
    parser.add_argument("--dir", required=True, help="the job's directory below /run/gemini-hpc")
    parser.add_argument("--share-bytes", type=int, default=0, help="the job's share of the node's cap; 0: all")
    parser.add_argument("--share", default="", help="what it is of the node, such as '1 of 64 CPUs'")
    parser.add_argument("--keys", action="store_true", help=f"take the job's keys from descriptor {spawn.HANDED}")
    parser.add_argument("--own", action="store_true", help="the job has started this agent, not its site's prolog")
    args = parser.parse_args()
    score = oom.OwnScore()  # while the score still belongs to root
    try:
        spawn.drop_privileges(args.uid, args.dir)
    except privileges.PrivilegeError as exc:
        print(f"gemini-hpc: agent: {exc}", file=sys.stderr)
        return 2
    try:
        settings = build_own_settings() if args.own else load_site_settings()
        if args.keys:
            _take_keys(args.uid)
    except (ConfigError, ValueError) as exc:
        print(f"gemini-hpc: agent: {exc}", file=sys.stderr)
        return 2
    return _supervise(settings, args, score)


if __name__ == "__main__":
    sys.exit(main())
