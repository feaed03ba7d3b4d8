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
_WORK = re.compile(r"rank \d+(?: of (\S+))? (step|sealed|outlined) (\d+) ?")
_PLACE = re.compile(r"/tmp/gemini-sim-[^/ ]*")


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
    "hangs": _site("hangs", "All processes of a node stop for a while. Its kernel lives, so it is never fenced."),
    "cut-off": _site("cut-off", "A node is cut off from the controller's host, not from its peers."),
    "survivor-cut": _site(
        "survivor-cut", "A survivor is cut off from the controller's host while the job is on its way back."
    ),
    "second": _site("second", "A survivor loses power while the job is on its way back."),
    "reboot": _site("reboot", "A node loses power and boots within seconds. Its memory is gone."),
    "controller-killed": _site("controller-killed", "The controller dies in the middle of a recovery."),
    "slurmctld-killed": _site("slurmctld-killed", "slurmctld dies in the middle of a recovery."),
    "backup": _site("backup", "The host of controller and slurmctld dies, and the backup host takes over."),
    "no-controller": _site("no-controller", "No controller runs. The epilog's fallback requeues the job."),
    "observes": _site("observes", 'Under mode = "observe" the controller records what it withholds.'),
    "cancels": _site("cancels", "The user cancels the job while it is being recovered. It stays cancelled."),
    "drained-dies": _site("drained-dies", "A node that the administrator has drained loses power."),
    "salvage": _tier("node_lost", "A job does not come back after a loss. Its survivors save it to the tier."),
    "spare": Story(
        "A job with spares: a rank stops, and two parts of the network do not reach each other.",
        partial(campaign.run_spared, 5),
    ),
    "live-replicas": Story(
        "Three nodes lose power. Shards without a holder are copied from living ranks.", partial(campaign.run_live, 4)
    ),
    "parity": Story(
        "A node of a parity group loses power, and another one's agent dies.", partial(campaign.run_xor, 2)
    ),
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
        if (work := _WORK.fullmatch(event)) is not None:
            at, launch = float(time), work[1] or ""
            steps = max(steps, int(work[3])) if work[2] == "step" else steps
            sealed = max(sealed, int(work[3])) if work[2] == "sealed" else sealed
            continue
        if steps or sealed:
            where = f" of {launch}" if launch else ""
            done = [f"step {steps}"] * (steps > 0) + [f"sealed {sealed}"] * (sealed > 0)
            yield f"{at:8.1f}  the ranks{where} train: {', '.join(done)}"
            steps = sealed = 0
        launch = ""
        yield f"{float(time):8.1f}  {_PLACE.sub('/tmp', event)}"


def differences(name: str) -> str:
    """Return how a story differs from its file, as a diff; "" if it does not."""
    path = DIRECTORY / f"{name}.txt"
    before = path.read_text().splitlines(keepends=True) if path.exists() else []
    after = told(name).splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"{path.name} (checked in)", f"{path.name} (now)", n=1))


def main() -> int:
    """Return the exit status: 0 if all stories are written, or with --check the same as before."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; print what differs")
    args = parser.parse_args()
    with_equal_hashes("tests.sim.golden")
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        if args.check:
            found = [text for text in pool.map(differences, STORIES) if text]
            sys.stdout.writelines(found)
            return 1 if found else 0
        for name, text in zip(STORIES, pool.map(told, STORIES), strict=True):
            (DIRECTORY / f"{name}.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
