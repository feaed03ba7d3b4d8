"""Negative controls, each with a seed that shows its harm: `python -m tests.sim.seeds` finds what has lost its seed.

`seeds.json` has the seeds. Of those that show the harm the cheapest is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import broken as of_sites
from . import campaign, controls, mix, scenarios, tier_stories
from .apart import Ended, Told, apart, with_equal_hashes

FILE = Path(__file__).with_name("seeds.json")
COMMAND = "python -m tests.sim.seeds"
SEEDS = 400
CHEAP_S, SPENT_S = 0.3, 8.0  # CPU seconds: of a seed that is cheap enough; of a search for a cheaper one


@dataclass(frozen=True)
class Control:
    """A rule that is taken away. run: the story of a seed without it; words: what is said of the harm.

    An error of the control's own code is no harm.
    """

    run: Callable[[int], Told]
    words: str = "Wrong: "

    def shows(self, ended: Ended) -> bool:
        """Return whether the run found the harm."""
        return bool(ended.problem) and self.words in ended.problem


# a rule, a scenario in which its absence shows, and how
_SITES = [
    ("no-reservation", "busy", "Wrong: survivors"),
    ("keeps-reservations", "power", "Wrong: held"),
    ("fences-living-kernels", "hangs", "Wrong: healthy"),
    ("no-budget", "outage", "Wrong: budget"),
    ("opens-the-gate", "observes", "Wrong: observed only"),
    ("starts-now", "power", "Wrong: ended"),
    ("resumes-nothing", "controller-killed", "Wrong: held"),
    ("tells-once", "backup", "Wrong: ended"),
    ("looks-away", "ends-early", "Wrong: ended"),
    ("no-user-budget", "budgets", "Wrong: budget of a user"),
    ("anybodys-candidates", "neighbours", "Wrong: candidates"),
    ("takes-drains-for-ours", "drained-dies", "Wrong: administrator"),
    ("leaves-the-completed", "ends-well", "Wrong: ended"),
    ("frees-the-completed", "no-kill", "Wrong: ended"),
    ("sends-back-the-cancelled", "cancels", "Wrong: administrator"),
]
# the same where no scenario leads there: what is drawn does
_MIXED = [
    ("keeps-reservations", "Wrong: held"),
    ("resumes-nothing", "Wrong: held"),
    ("fences-living-kernels", "Wrong: healthy"),
    ("anybodys-candidates", "Wrong: candidates"),
    ("no-budget", "Wrong: budget"),
]
# the same of a job with a tier
_TIER = [
    ("unsynced", "power", "was chosen"),
    ("blind", "bad_tier", "was whole, and removed"),
    ("forgetful", "kept", "was to be kept, and removed"),
    ("unmarked", "rejected", ""),
    ("untidy", "agents_die", "stay"),
    ("at_once", "ends_again", "whole"),
    ("silent_leave", "succeeds", "all agents have ended"),
    ("left", "node_lost", "is on the tier"),
    ("trusting", "power", "is called whole"),
    ("any_map", "old_nodes", "was chosen"),
    ("memory_first", "old_nodes", "was chosen"),
    ("unseen_forgotten", "old_nodes", "was chosen"),
    ("unseen_begins", "old_nodes", "was chosen"),
    ("unsealed", "node_lost", "is on the tier"),
    ("first_holder", "node_lost", "is on the tier"),
]


def _each() -> Iterator[tuple[str, Control]]:
    for kind, run, rules in (
        ("clusters", campaign.run, controls.CONTROLS),
        ("spares", campaign.run_spared, controls.SPARED),
        ("live", campaign.run_live, controls.LIVE),
        ("xor", campaign.run_xor, controls.XOR),
        ("miscounts", campaign.run_miscounting, controls.MISCOUNTS),
        ("rdma", campaign.run_rdma, controls.RDMA),
    ):
        for rule, broken in rules.items():
            yield f"{kind}/{rule}", Control(partial(run, broken=broken))
    for rule, name, words in _SITES:
        yield f"sites/{rule}", Control(partial(scenarios.tell, name, broken=of_sites.BROKEN[rule]), words)
    for rule, words in _MIXED:
        yield f"mix/{rule}", Control(partial(mix.run, broken=of_sites.BROKEN[rule]), words)
    for rule, name, words in _TIER:
        yield f"tier/{rule}", Control(partial(tier_stories.tell, name, broken=rule), words)


CONTROLS = dict(_each())
KINDS = list(dict.fromkeys(name.partition("/")[0] for name in CONTROLS))


def noted() -> dict[str, int]:
    """Return the seed of each control that has one."""
    seeds: dict[str, int] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return seeds


def note(name: str, seed: int) -> None:
    """Write a control's seed down, and drop what names no control."""
    seeds = {**noted(), name: seed}
    text = json.dumps({name: seeds[name] for name in CONTROLS if name in seeds}, indent=2) + "\n"
    made = FILE.with_suffix(".new")
    made.write_text(text)
    made.replace(FILE)  # others read it meanwhile


def with_seed(name: str, seed: int) -> Ended:
    """Run a control with a seed."""
    return apart(partial(CONTROLS[name].run, seed))


def find(name: str, most: int) -> tuple[int, Ended] | None:
    """Return the cheapest seed that shows the harm, and what it shows; None: not one of so many does."""
    best: tuple[int, Ended] | None = None
    spent_s = 0.0
    for seed in range(1, most + 1):
        ended = with_seed(name, seed)
        spent_s += ended.cpu_s
        if CONTROLS[name].shows(ended) and (best is None or ended.cpu_s < best[1].cpu_s):
            best = seed, ended
        if best is not None and (best[1].cpu_s < CHEAP_S or spent_s > SPENT_S):
            break
    return best


def lost(name: str) -> str:
    """Return what to do where a control's seed does not show the harm; "": it does."""
    seed = noted().get(name)
    if seed is None:
        return f"{name} has no seed: {COMMAND} {name}"
    ended = with_seed(name, seed)
    if CONTROLS[name].shows(ended):
        return ""
    return f"seed {seed} does not show {name} any more, but {ended.problem[:300] or 'nothing'}: {COMMAND} {name}"


def mend(name: str, *, anew: bool, most: int) -> tuple[str, int]:
    """Return what to say of a control, and its seed, 0 for none: the noted one, or where that is lost a new one."""
    if not anew and not lost(name):
        return "", noted()[name]
    found = find(name, most)
    if found is None:
        return f"{name}: no seed up to {most} shows it", 0
    seed, ended = found
    return f"{name}: seed {seed}, {ended.cpu_s:.1f} CPU s: {ended.problem[:300]}", seed


def main() -> int:
    """Return the exit status: 0 where each control shows its harm."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CONTROL", help=f"or one of {', '.join(KINDS)}; default: all")
    parser.add_argument("--check", action="store_true", help="only say which seeds are lost")
    parser.add_argument("--anew", action="store_true", help="find a cheaper one also where none is lost")
    parser.add_argument("--story", action="store_true", help="print what the noted seed shows")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"how many to try (default: {SEEDS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    args = parser.parse_args()
    with_equal_hashes("tests.sim.seeds")
    names = [name for name in CONTROLS if not args.names or {name, name.partition("/")[0]} & set(args.names)]
    if not names:
        parser.error(f"no such control; there are {' '.join(CONTROLS)}")
    if args.story:
        for name in names:
            ended = with_seed(name, noted()[name])
            print(f"{ended.story}\n{name} seed {noted()[name]}: {ended.problem}")
        return 0
    status = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        if args.check:
            for complaint in filter(None, pool.map(lost, names)):
                status = 1
                print(complaint, flush=True)
            return status
        mended = pool.map(partial(mend, anew=args.anew, most=args.seeds), names)
        for name, (said, seed) in zip(names, mended, strict=True):
            if said:
                print(said, flush=True)
            if seed:
                note(name, seed)
            else:
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
