"""Twenty simulated stories as text, to read and to compare: `python -m tests.sim.golden` writes `golden/*.txt` anew.

Each file is a run of the production agents and controller in virtual time. A change of the protocol changes them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from . import campaign, scenarios, tier_stories
from .apart import Told, apart, with_equal_hashes

DIRECTORY = Path(__file__).with_name("golden")
COMMAND = "python -m tests.sim.golden"
_WORK = re.compile(r"rank \d+(?: of (\S+))? (step|sealed) (\d+) ?")


class Story(NamedTuple):
    """A run. title: what happens in it, in a sentence."""

    title: str
    run: Callable[[], Told]


def _site(name: str, title: str, seed: int = 1) -> Story:
    return Story(title, partial(scenarios.tell, name, seed))


def _tier(name: str, title: str, seed: int = 1) -> Story:
    return Story(title, partial(tier_stories.tell, name, seed))


STORIES: dict[str, Story] = {
    "power": _site("power", "A node loses power. It is fenced, and the job resumes on the others and a spare."),
    "no-kill": _site("no-kill", "The same under --no-kill, where Slurm counts the job as COMPLETED."),
    "fails": _site("fails", "The script fails by itself, and no node is lost. The controller does nothing."),
    "ends-early": _site("ends-early", "A node dies and the script ends before an agent has noticed it."),
    "hangs": _site("hangs", "A node's kernel lives, and its slurmd and its agent do not answer."),
    "cut-off": _site("cut-off", "The network of a node is cut. It is fenced, and may come back."),
    "survivor-cut": _site("survivor-cut", "While the job waits, a survivor is cut off as well."),
    "second": _site("second", "A second node dies while the job is being requeued."),
    "reboot": _site("reboot", "A node reboots, and its memory is gone before anybody has missed it."),
    "controller-killed": _site("controller-killed", "The controller dies in the middle of a recovery."),
    "slurmctld-killed": _site("slurmctld-killed", "slurmctld dies in the middle of a recovery."),
    "backup": _site("backup", "The host of controller and slurmctld dies, and the backup host takes over."),
    "no-controller": _site("no-controller", "No controller runs. The epilog's fallback requeues the job."),
    "observes": _site("observes", 'Under mode = "observe" the controller records what it withholds.'),
    "kept-versions": _tier("kept", "A version that the user wants to keep reaches the tier and stays there."),
    "rejected-versions": _tier("rejected", "The user rejects versions. The job resumes from an older one."),
    "salvage": _tier("node_lost", "A job does not come back after a loss. Its survivors save it to the tier."),
    "spare": Story("Jobs with spares of their own lose nodes and processes.", partial(campaign.run_spared, 5)),
    "live-replicas": Story("Ranks that are replicas of each other lose holders.", partial(campaign.run_live, 4)),
    "parity": Story("Nodes that keep parity lose a member of a group.", partial(campaign.run_xor, 2)),
}


def told(name: str) -> str:
    """Return a story as text: one line an event, and one line for each run of plain iterations."""
    story = STORIES[name]
    ended = apart(story.run)
    if ended.problem:
        raise SystemExit(f"{name}: {ended.problem}")
    return "\n".join([f"{name}: {story.title}", "", *_lines(ended.story)]) + "\n"


def _lines(text: str) -> Iterator[str]:
    at, launch, steps, sealed = 0.0, "", 0, 0
    for line in text.splitlines():
        time, _, event = line.strip().partition(" ")
        work = _WORK.fullmatch(event)
        if work is not None and work[1] in (launch or work[1], None):
            at, launch = float(time), work[1] or ""
            steps, sealed = (max(steps, int(work[3])), sealed) if work[2] == "step" else (steps, int(work[3]))
            continue
        if steps or sealed:
            where = f" of {launch}" if launch else ""
            yield f"{at:8.1f}  the ranks{where} train: step {steps or sealed}, sealed {sealed}"
            steps = sealed = 0
        launch = ""
        yield f"{float(time):8.1f}  {event}"


def differences(name: str) -> str:
    """Return how a story differs from its file, as a diff; "" if it does not."""
    path = DIRECTORY / f"{name}.txt"
    before = path.read_text().splitlines(keepends=True) if path.exists() else []
    after = told(name).splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"{path.name} (checked in)", f"{path.name} (now)", n=1))


def main() -> int:
    """Return the exit status: 0 if all stories are written, or with --check the same as before."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*STORIES, []], help="default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; print what differs")
    args = parser.parse_args()
    with_equal_hashes("tests.sim.golden")
    names = args.names or list(STORIES)
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        if args.check:
            found = [text for text in pool.map(differences, names) if text]
            sys.stdout.writelines(found)
            return 1 if found else 0
        for name, text in zip(names, pool.map(told, names), strict=True):
            (DIRECTORY / f"{name}.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
