"""Kills the agent proper of the next job on this node at a moment of its first recovery round.

    python killer.py WHEN SECONDS

WHEN: `attached`, when its state file is there; `planned`, when that has a plan; `live`, when it says that *go* was
heard. Looks at nothing else meanwhile, so that it is there within some ten microseconds. Prints "ready", then what it
has killed; ends with an error after SECONDS.
"""

from __future__ import annotations

import os
import signal
import sys
import time

RUN = "/run/gemini-hpc"
MARKS = {"attached": b'"attach"', "planned": b'"plan":{', "live": b'"live":true'}


def jobs() -> set[str]:
    try:
        return {name for name in os.listdir(RUN) if name.isdigit()}
    except FileNotFoundError:
        return set()


def agents(job: str) -> list[int]:
    """The supervisor and the agent proper of a job: the one has the other for its child."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                arguments = f.read().split(b"\0")
            with open(f"/proc/{pid}/stat", "rb") as f:
                parent = int(f.read().rsplit(b")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if b"gemini_hpc.agent" in arguments and job.encode() in arguments:
            found[int(pid)] = parent
    return [pid for pid, parent in found.items() if parent in found]


def main(when: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    known, mark = jobs(), MARKS[when]
    print("ready", flush=True)
    while not (new := jobs() - known):
        if time.monotonic() > deadline:
            return "no job has come"
        time.sleep(0.002)
    job = new.pop()
    while not (found := agents(job)):
        if time.monotonic() > deadline:
            return "no agent has come"
    path, state = f"{RUN}/{job}/state", b""
    while mark not in state:
        try:
            with open(path, "rb") as f:
                state = f.read()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return "the agent has not come so far"
    os.kill(found[0], signal.SIGKILL)
    print(
        f"killed {found[0]} of job {job}; in its state {[name for name, m in MARKS.items() if m in state]}",
        flush=True,
    )
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
