"""`python -m tests.sim`: simulated clusters by seed, several at a time; each in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from . import campaign, mix
from .apart import Ended, Told, apart, with_equal_hashes

Run = Callable[[int], Told]


def once(seed: int, run: Run) -> Ended:
    """Run a seed in a process of its own."""
    return apart(partial(run, seed))


def twice(seed: int, run: Run) -> Ended:
    """Run a seed two times: the second run has to be the first one to the letter."""
    first, second = once(seed, run), once(seed, run)
    if (first.problem, first.story) == (second.problem, second.story):
        return first
    lines = zip(first.story.splitlines(), second.story.splitlines(), strict=False)
    where = next((f"{a} | {b}" for a, b in lines if a != b), "one is longer")
    return Ended(f"not repeated: {where}", first.story, first.cpu_s)


def several(run: Callable[[int], Ended], seeds: range, jobs: int) -> Iterator[tuple[int, Ended]]:
    """Run the seeds, some at a time."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from zip(seeds, pool.map(run, seeds, chunksize=4), strict=True)


def main() -> int:
    """Return the exit status: 0 where no seed has found anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first one (default: 1)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="this one only; print its story")
    parser.add_argument("--twice", action="store_true", help="run each seed twice: both have to be the same")
    parser.add_argument(
        "--site", action="store_true", help="whole sites, with Slurm, controller, tier and an administrator"
    )
    parser.add_argument("--spares", action="store_true", help="jobs with spares of their own (--gemini-spares)")
    parser.add_argument("--live", action="store_true", help="jobs whose ranks are replicas of each other")
    parser.add_argument("--xor", action="store_true", help="jobs whose nodes keep parity (--gemini-redundancy=xor)")
    parser.add_argument(
        "--miscounts", action="store_true", help="jobs whose ranks do not mean the same iteration by each version"
    )
    parser.add_argument("--rdma", action="store_true", help="agents with devices for RDMA, whose bytes come late")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    args = parser.parse_args()
    with_equal_hashes("tests.sim")
    kinds: tuple[tuple[bool, Run], ...] = (
        (args.site, mix.run),
        (args.spares, campaign.run_spared),
        (args.live, campaign.run_live),
        (args.xor, campaign.run_xor),
        (args.miscounts, campaign.run_miscounting),
        (args.rdma, campaign.run_rdma),
    )
    run = next((run for wanted, run in kinds if wanted), campaign.run)
    if args.seed is not None:
        ended = once(args.seed, run)
        print(ended.story)
        print(f"seed {args.seed}: {ended.problem or 'nothing wrong'}")
        return 1 if ended.problem else 0
    began, bad = time.monotonic(), 0
    seeds = range(args.first, args.first + args.seeds)
    ran = several(partial(twice if args.twice else once, run=run), seeds, args.jobs)
    for count, (seed, ended) in enumerate(ran, 1):
        if ended.problem:
            bad += 1
            print(f"seed {seed}: {ended.problem[:300]}", flush=True)
        if count % 100 == 0:
            print(f"{count} seeds, {bad} of them wrong, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{args.seeds} {'sites' if args.site else 'seeds'} in {time.monotonic() - began:.1f} s: {bad} went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
