"""`python -m tests.sim`: simulated clusters by seed, several at a time; each in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from . import broken as of_sites
from . import campaign, controls, mix

Run = Callable[[int, Callable[[], None]], tuple[str, str]]
BROKEN = {**controls.CONTROLS, **controls.SPARED, **controls.LIVE, **controls.XOR, **of_sites.BROKEN}


def one(seed: int, broken: str = "", run: Run = campaign.run) -> tuple[int, str, str]:
    """A seed, what went wrong, its story."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        problem, text = run(seed, BROKEN.get(broken, lambda: None))
        with os.fdopen(write, "w") as out:
            out.write(f"{problem}\n{text}")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as found:
        problem = found.readline().rstrip("\n")
        text = found.read()
    _, status = os.waitpid(pid, 0)
    return seed, problem or (f"ended with status {status}" if status else ""), text


def of_site(seed: int) -> tuple[int, str, str]:
    """The same of a whole site."""
    return one(seed, run=mix.run)


def of_spares(seed: int) -> tuple[int, str, str]:
    """The same of a job with spares of its own."""
    return one(seed, run=campaign.run_spared)


def of_live(seed: int) -> tuple[int, str, str]:
    """The same of a job whose ranks are replicas of each other."""
    return one(seed, run=campaign.run_live)


def of_xor(seed: int) -> tuple[int, str, str]:
    """The same of a job whose nodes keep parity."""
    return one(seed, run=campaign.run_xor)


def twice(seed: int, once: Callable[[int], tuple[int, str, str]] = one) -> tuple[int, str, str]:
    """The same, where a second run has to be the first one to the letter."""
    first, second = once(seed), once(seed)
    if first == second:
        return first
    lines = zip(first[2].splitlines(), second[2].splitlines(), strict=False)
    where = next((f"{a} | {b}" for a, b in lines if a != b), "one is longer")
    return seed, f"not repeated: {where}", first[2]


def site_twice(seed: int) -> tuple[int, str, str]:
    """The same of a whole site."""
    return twice(seed, of_site)


def several(run: Callable[[int], tuple[int, str, str]], seeds: range, jobs: int) -> Iterator[tuple[int, str, str]]:
    """As they end."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, seeds, chunksize=4)


def find(rule: str, seeds: range, run: Run = campaign.run) -> int:
    """Whether breaking the rule is found: the exit status is 0 where it is."""
    of_run: dict[Run, dict[str, Callable[[], None]]] = {
        mix.run: of_sites.BROKEN,
        campaign.run_spared: controls.SPARED,
        campaign.run_live: controls.LIVE,
        campaign.run_xor: controls.XOR,
    }
    rules = of_run.get(run, controls.CONTROLS)
    if rule not in rules:
        kinds = {
            "": controls.CONTROLS,
            "--spares ": controls.SPARED,
            "--live ": controls.LIVE,
            "--xor ": controls.XOR,
        }
        for kind, listed in {**kinds, "--site ": of_sites.BROKEN}.items():
            for name, broken in listed.items():
                print(f"{kind}--broken {name}: {broken.__doc__}")
        return 2
    for seed in seeds:
        _, problem, _ = one(seed, rule, run)
        if problem:
            print(f"{rule}: seed {seed}: {problem[:300]}")
            return 0
    print(f"{rule}: not found by {len(seeds)} seeds")
    return 1


def main() -> int:
    """The exit status: 0 where no seed has found anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first one (default: 1)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="this one only; print its story")
    parser.add_argument(
        "--broken", metavar="RULE", help="with one rule taken away, until a seed finds that; ? lists them"
    )
    parser.add_argument("--twice", action="store_true", help="run each seed twice: both have to be the same")
    parser.add_argument(
        "--site", action="store_true", help="whole sites, with Slurm, controller, tier and an administrator"
    )
    parser.add_argument("--spares", action="store_true", help="jobs with spares of their own (--gemini-spares)")
    parser.add_argument("--live", action="store_true", help="jobs whose ranks are replicas of each other")
    parser.add_argument("--xor", action="store_true", help="jobs whose nodes keep parity (--gemini-redundancy=xor)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    if args.broken:
        run_one = campaign.run_live if args.live else campaign.run_spared if args.spares else campaign.run
        run_one = mix.run if args.site else campaign.run_xor if args.xor else run_one
        return find(args.broken, range(args.first, args.first + args.seeds), run_one)
    if args.seed is not None:
        kinds = ((args.site, of_site), (args.spares, of_spares), (args.live, of_live), (args.xor, of_xor))
        _, problem, text = next((run for wanted, run in kinds if wanted), one)(args.seed)
        print(text)
        print(f"seed {args.seed}: {problem or 'nothing wrong'}")
        return 1 if problem else 0
    run = (site_twice if args.twice else of_site) if args.site else twice if args.twice else one
    run = of_spares if args.spares else of_live if args.live else of_xor if args.xor else run
    began, bad = time.monotonic(), 0
    seeds = range(args.first, args.first + args.seeds)
    for count, (seed, problem, _) in enumerate(several(run, seeds, args.jobs), 1):
        if problem:
            bad += 1
            print(f"seed {seed}: {problem[:300]}", flush=True)
        if count % 100 == 0:
            print(f"{count} seeds, {bad} of them wrong, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{args.seeds} {'sites' if args.site else 'seeds'} in {time.monotonic() - began:.1f} s: {bad} went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
