"""`python3 -I -m gemini_hpc.agent`: started by the prolog, as the job's owner.

The process that was started stays as a small supervisor: it starts the agent proper again when that dies,
a bounded number of times. Trainers then hand their memory back to the new one.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time

from gemini_hpc.config import ConfigError, Settings, load

_SETTLED_S = 60.0


def _child(settings: Settings, args: argparse.Namespace, again: bool) -> int:
    # Two descriptors a shard, one a client: what slurmd passes on (often 1024) is for programs with select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # The agent speaks no TLS and hashes with blake2b and xxh3: OpenSSL would be a sixth of its memory.
    sys.modules.update(dict.fromkeys(("ssl", "_ssl", "_hashlib")))  # type: ignore[arg-type]
    from gemini_hpc.agent.agent import serve

    return serve(settings, job=args.job, uid=args.uid, node=args.node, directory=args.dir, again=again)


def _supervise(settings: Settings, args: argparse.Namespace) -> int:
    deaths = 0
    while True:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _child(settings, args, deaths > 0)
            except SystemExit as exc:
                print(exc, file=sys.stderr, flush=True)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        signal.signal(signal.SIGTERM, lambda *_, child=pid: os.kill(child, signal.SIGTERM))
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return 0
        deaths = 1 if time.monotonic() - started > _SETTLED_S else deaths + 1
        print(
            f"gemini-hpc: agent of job {args.job} died (status {status}, death {deaths})", file=sys.stderr, flush=True
        )
        if deaths > settings.agent_restarts:
            return 1
        time.sleep(0.05 * deaths)


def main() -> int:
    """Supervise one agent; the exit status."""
    parser = argparse.ArgumentParser(prog="gemini_hpc.agent", description="Node-resident agent of one job.")
    parser.add_argument("--job", type=int, required=True, help="raw Slurm job id")
    parser.add_argument("--uid", type=int, required=True, help="uid of the job's owner; must be this process's")
    parser.add_argument("--node", required=True, help="this node's name in Slurm")
    parser.add_argument("--dir", required=True, help="the job's directory below /run/gemini-hpc")
    args = parser.parse_args()
    if os.geteuid() != args.uid:
        print(f"gemini-hpc: agent: wanted uid {args.uid}, running as {os.geteuid()}", file=sys.stderr)
        return 2
    try:
        settings = load()
    except ConfigError as exc:
        print(f"gemini-hpc: agent: {exc}", file=sys.stderr)
        return 2
    os.umask(0o077)
    return _supervise(settings, args)


if __name__ == "__main__":
    sys.exit(main())
