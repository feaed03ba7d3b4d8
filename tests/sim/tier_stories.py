"""What jobs with a tier go through; `python -m tests.sim.tier_stories NAME... SEED...` names the wrong ones."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial

from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import local

from .apart import Told, apart, with_equal_hashes
from .launches import Job
from .rank import SET, Rank
from .tier import JOB, KEEP_LAST
from .tier_broken import BROKEN

_MANY = 100_000  # steps: until something ends it


def _begin(job: Job, steps: int = _MANY, pause_s: float = 0.1) -> None:
    said = job.allocate(list(job.nodes))
    job.check(set(said.values()) == {"mapped"}, f"the prologs said {said}")
    job.launch(steps, pause_s=pause_s)


def _again(job: Job, *, fresh: bool, steps: int) -> None:
    """After all nodes have lost power: the job begins anew, from what is on the tier."""
    job.sleep(job.rng.uniform(1.0, 20.0))
    if fresh:
        hosts = job.add(len(job.hosts))
    else:
        hosts = list(job.hosts)
        for name in hosts:
            job.nodes[name].power_on()
    newest = (job.tier.offered() or [Stamp(0, 0)])[0]
    job.allocate(hosts)
    job.launch(newest.version + steps)
    job.wait(lambda: len(job.resumed) == len(hosts), 120.0, "all ranks resume")
    chosen = {rank._chosen for rank in job.ranks}
    job.check(chosen == {(newest.epoch, newest.version)}, f"{newest} is on the tier, {chosen} was chosen")


def _launch_again(job: Job) -> None:
    """Another step of the same incarnation, or several: a rank whose agent dies while it loads ends."""
    for _ in range(5):
        job.end_step()
        job.sleep(job.rng.uniform(0.2, 1.0))
        job.launch(_MANY)
        job.wait(lambda: len(job.resumed) == len(job.hosts) or not job.whole, 120.0, "all ranks resume, or one ends")
        if job.whole:
            return
    job.check(False, "no launch resumes")


def _succeed(job: Job) -> None:
    """The training ends, and the job with it; no agent stays, and nothing half done."""
    job.wait(lambda: not job.running, 300.0, "the training ends")
    job.check(all(rank.done for rank in job.ranks), f"ranks fail: {[rank.reason for rank in job.ranks]}")
    job.check(not job.unprotected, f"unprotected: {job.unprotected[:1]}")
    job.end("0")
    job.wait(lambda: not job.agents, 200.0, "all agents have ended")
    _only_what_stays(job, success=True)


def _only_what_stays(job: Job, *, success: bool = False) -> None:
    half = job.tier.stamps(whole=False)
    if success:  # a node that heard of a save after the root had gone writes its part in vain, and nobody knows
        half = [stamp for stamp in half if stamp < job.tier.published[-1]] if job.tier.published else []
    job.check(not half, f"half versions stay: {half}")
    named = {stamp for _, stamp in job.tier.names().values()}
    stay = [stamp for stamp in job.tier.offered() if stamp not in named]
    job.check(len(stay) <= KEEP_LAST, f"{stay} stay")
    parts = [name for name in os.listdir(job.tier.directory) if not name.startswith("e")] if job.tier.stamps() else []
    job.check(not parts, f"{parts} stay")


def _saves(job: Job, count: int, within_s: float) -> None:
    """Further versions become whole, and what is older is tidy then."""
    before = len(job.tier.published)
    job.wait(lambda: len(job.tier.published) >= before + count, within_s, f"{count} further versions are saved")
    newest = job.tier.published[-1]

    def half() -> list[Stamp]:
        return [stamp for stamp in job.tier.stamps(whole=False) if stamp < newest]

    job.wait(lambda: not half(), 10.0, f"half versions go: {half()}")


def _finish_at(job: Job, steps: int) -> None:
    job.last = job.reached + steps


def _kills(job: Job, count: int, *, least_s: float = 0.3, most_s: float = 1.5) -> None:
    """Agents die, one at a time or the root again and again."""
    for _ in range(count):
        job.sleep(job.rng.uniform(least_s, most_s))
        victim = job.hosts[0] if job.rng.random() < 0.4 else job.rng.choice(job.hosts)
        job.nodes[victim].kill_agent(JOB, job.rng.randrange(150))


# ---- scenarios ---------------------------------------------------------------------------------------------


def power(job: Job) -> None:
    """All nodes lose power, at any moment, again and again: the newest whole version comes back."""
    _begin(job)
    job.sleep(job.rng.uniform(0.0, 8.0))
    for _ in range(job.rng.randint(1, 3)):
        job.power_off(job.up)
        _again(job, fresh=job.rng.random() < 0.5, steps=_MANY)
        job.sleep(job.rng.uniform(0.0, 6.0))
    _finish_at(job, 20)
    _succeed(job)


def agents_die(job: Job) -> None:
    """During saves, the root as well, and workers by themselves: training goes on, and so do saves."""
    _begin(job)
    job.tier.deaths = job.rng.choice([0.0, 0.0, 0.2])
    _kills(job, 8)
    job.tier.deaths = 0.0
    _saves(job, 2, 60.0)
    job.check(job.slowest_s < 12.0, f"a step took {job.slowest_s:.1f} s")
    _finish_at(job, 3)
    _succeed(job)


def bad_tier(job: Job) -> None:
    """Full, slow, hanging, broken, not there: training does not care, one hears of it once, and it is over when it
    is over."""
    _begin(job, pause_s=0.3)
    job.sleep(job.rng.uniform(1.5, 5.0))
    faults, kind = job.tier.system.faults, job.rng.choice(["full", "slow", "hangs", "broken", "gone", "refuses"])
    for _ in range(2):
        job.world.tell(f"TIER {kind}")
        if kind == "full":
            faults.full = job.rng.choice([0.1, 0.5, 1.0])
        elif kind == "slow":
            faults.slow_s = job.rng.uniform(1.0, 20.0)
        elif kind == "hangs":
            faults.hangs = True
        elif kind == "broken":
            faults.broken = job.rng.choice([0.02, 0.2, 1.0])
        elif kind == "gone":
            job.tier.system.vanish()
        else:
            job.tier.refuses = job.rng.choice([0.3, 1.0])
        reached, since = job.reached, job.loop.now
        lasts_s = job.rng.choice([job.rng.uniform(1.0, 10.0), job.rng.uniform(10.0, 200.0)])
        job.sleep(lasts_s)
        job.check(job.reached > reached + 2.0 * (job.loop.now - since), f"{job.reached - reached} steps in {lasts_s}")
        job.world.tell("TIER well")
        job.tier.system.over()
        job.tier.system.come_back()
        job.tier.refuses = 0.0
        _saves(job, 2, 200.0)
    job.check(job.slowest_s < 3.0, f"a step took {job.slowest_s:.1f} s")
    _told_once(job)
    _finish_at(job, 3)
    _succeed(job)


def _told_once(job: Job) -> None:
    told: set[str] = set()
    for _, text in job.world.story:
        if " saved v" in text:
            told.clear()
        elif " not_saved v" in text:
            kind = re.sub(r"[0-9]+", "", text.split(" ", 1)[1])
            job.check(kind not in told, f"told again: {text}")
            told.add(kind)


def node_lost(job: Job) -> None:
    """A job loses a node and does not come back: what was sealed last goes to the tier, from who is left."""
    _begin(job)
    job.sleep(job.rng.uniform(0.8, 6.0))
    job.wait(lambda: job.sealed > Stamp(0, 0), 30.0, "a version is sealed")
    lost = job.rng.choice(job.hosts)
    job.power_off([lost])
    job.sleep(job.rng.uniform(0.0, 10.0))
    job.end("1")
    sealed = _known(job)
    job.check(sealed >= job.sealed or lost == job.hosts[0], f"ranks saw {job.sealed}, agents know {sealed}")
    job.tier.deaths = job.rng.choice([0.0, 0.0, 0.1])
    faults, kind = job.tier.system.faults, job.rng.choice(["", "", "full", "hangs"])
    faults.hangs, faults.full = kind == "hangs", 0.5 if kind == "full" else 0.0
    if job.replicas > 2 and job.rng.random() < 0.5:
        job.sleep(job.rng.uniform(0.0, 6.0))
        job.nodes[job.rng.choice(job.up)].kill_agent(JOB, job.rng.randrange(200))
    if kind:
        job.sleep(job.rng.uniform(1.0, 200.0))
        job.tier.system.over()
    job.wait(lambda: (job.tier.offered() or [Stamp(0, 0)])[0] >= sealed, 900.0, f"{sealed} is on the tier")
    job.tier.deaths = 0.0
    job.wait(lambda: not job.agents, 1500.0, "all agents have ended")
    _only_what_stays(job)
    _again(job, fresh=True, steps=10)
    _succeed(job)


def _known(job: Job) -> Stamp:
    """The newest seal that an agent knows of."""
    agents = [agent for agent in map(job.agent, job.up) if agent is not None]
    return max((t.sealed for a in agents for t in a.trainings if t.sealed is not None), default=Stamp(0, 0))


def comes_back(job: Job) -> None:
    """A job loses a node and comes back with another one, while what was left is on its way to the tier or has just
    got there: nothing older than what was sealed last comes back, and nothing is mixed."""
    _begin(job)
    for _ in range(2):
        job.sleep(job.rng.uniform(0.8, 4.0))
        lost = job.rng.choice(job.hosts)
        job.power_off([lost])
        job.sleep(job.rng.uniform(0.0, 4.0))
        job.end("1")
        sealed = max(_known(job), (job.tier.offered() or [Stamp(0, 0)])[0])
        job.sleep(job.rng.uniform(0.0, 8.0))
        job.allocate([*job.up, *job.add(1)])
        _launch_again(job)
        chosen = {Stamp(*rank._chosen) for rank in job.ranks}
        job.check(min(chosen) >= sealed, f"{sealed} was sealed, {chosen} was chosen")
    _saves(job, 2, 60.0)
    _finish_at(job, 3)
    _succeed(job)


def old_nodes(job: Job) -> None:
    """A job comes back to nodes that it left long ago, whose agents hold what it had then; all others are gone. What
    the tier has is newer, and comes back, however late the tier can be seen."""
    _begin(job)
    job.wait(lambda: job.sealed > Stamp(0, 0), 30.0, "a version is sealed")
    job.sleep(job.rng.uniform(0.0, 3.0))
    left = job.hosts[:2]
    job.end("1")
    job.allocate([*job.hosts[2:], *job.add(2)])
    _launch_again(job)
    _saves(job, 1, 60.0)
    job.sleep(job.rng.uniform(0.0, 3.0))
    job.power_off(job.hosts)
    faults = job.tier.system.faults
    faults.hangs = job.rng.random() < 0.5
    job.allocate([*left, *job.add(1)])
    for _ in range(5):
        job.launch(_MANY)
        job.wait(
            lambda: len(job.resumed) == len(job.hosts) or job.unprotected, 120.0, "all ranks resume, or one may not"
        )
        if not job.unprotected:
            break
        job.check(faults.hangs or job.launches > 3, f"the tier can be seen: {job.unprotected[:1]}")
        job.end_step()
        job.sleep(job.rng.uniform(0.0, 30.0))
        job.tier.system.over()
    newest = job.tier.offered()[0]
    chosen = {Stamp(*rank._chosen) for rank in job.ranks}
    job.check(chosen == {newest}, f"{newest} is on the tier, {chosen} was chosen")
    job.tier.system.over()
    _saves(job, 1, 60.0)
    _finish_at(job, 3)
    _succeed(job)


def ends_again(job: Job) -> None:
    """A job fails, is run again at once, while its last version is still on its way, and fails again: each time what
    was sealed last gets to the tier."""
    _begin(job)
    for _ in range(3):
        job.wait(lambda: job.sealed > Stamp(0, 0), 30.0, "a version is sealed")
        job.sleep(job.rng.uniform(0.0, 3.0))
        job.end("1")
        job.sleep(job.rng.choice([0.0, job.rng.uniform(0.0, 0.6)]))
        job.allocate(job.hosts)
        job.launch(_MANY)
        job.wait(lambda: len(job.resumed) == len(job.hosts), 120.0, "all ranks resume")
    job.sleep(job.rng.uniform(0.0, 3.0))
    job.end("1")
    sealed = _known(job)
    job.wait(lambda: (job.tier.offered() or [Stamp(0, 0)])[0] >= sealed, 150.0, f"{sealed} is on the tier")
    job.wait(lambda: not job.agents, 1500.0, "all agents have ended")
    _only_what_stays(job)


def succeeds(job: Job) -> None:
    """A short job ends well, whoever dies about then: no agent stays, and where nobody died nothing half done."""
    _begin(job, job.rng.randrange(1, 30))
    deaths = job.rng.choice([0, 0, 1, 3])
    job.wait(lambda: not job.running, 60.0, "the training ends")
    for _ in range(deaths):
        job.nodes[job.rng.choice(job.hosts)].kill_agent(JOB, job.rng.randrange(30))
    job.end("0", late=job.rng.choice(job.hosts), late_s=job.rng.choice((0.0, 8.0)))
    job.wait(lambda: not job.agents, 2000.0 if deaths else 1.0, "all agents have ended")
    if not deaths:
        _only_what_stays(job, success=True)


def kept(job: Job) -> None:
    """Versions with names stay, whoever dies meanwhile."""
    promised: dict[str, int] = {}
    wanted = {job.rng.randrange(1, 60): f"best-{at}" for at in range(4)}

    def ask(what: str, rank: Rank, number: int) -> None:
        if what == "step" and number in wanted and rank.rank == number % len(job.hosts) and rank._agent is not None:
            name = wanted[number]
            try:
                reply, _ = rank._agent.ask(local.KeepVersion(SET, rank.rank, number, name))
            except (ConnectionError, TimeoutError):
                return
            job.world.tell(f"rank {rank.rank} asks for {name} of {number}: {reply}")
            if isinstance(reply, local.Ok):
                promised[name] = number

    job.watch = ask
    _begin(job)
    _kills(job, job.rng.choice([0, 6]))
    job.wait(lambda: job.reached > max(wanted), 120.0, "all is asked")
    job.wait(lambda: job.tier.names().keys() >= promised.keys(), 60.0, f"{promised} are kept")
    _saves(job, 4, 60.0)
    if job.rng.random() < 0.5:
        job.power_off(job.up)
        _again(job, fresh=True, steps=_MANY)
        _saves(job, 3, 60.0)
    wanted[job.reached + 5] = "last"  # the training may end before it is saved
    _finish_at(job, 5)
    _succeed(job)
    names = job.tier.names()
    for name, number in promised.items():
        found = names.get(name)
        job.check(found is not None and found[0] == number <= found[1].version, f"{name} of {number}: {found}")


def rejected(job: Job) -> None:
    """What a training has found bad is not offered again, also to who knows nothing of it."""
    _begin(job)
    job.wait(lambda: len(job.tier.published) >= 3, 60.0, "versions are saved")
    job.power_off(job.up)
    _again(job, fresh=True, steps=_MANY)
    bad = Stamp(*job.ranks[0]._chosen)
    if job.rng.random() < 0.5:
        job.sleep(job.rng.uniform(0.0, 3.0))
    asked: list[str] = []

    def say(what: str, rank: Rank, number: int) -> None:
        if what == "step" and not asked and rank._agent is not None:
            try:
                reply, _ = rank._agent.ask(local.Reject(SET, rank.rank, bad.version, "NaN"))
            except (ConnectionError, TimeoutError):
                return
            job.world.tell(f"rank {rank.rank} rejects {bad}: {reply}")
            asked.append(type(reply).__name__)

    job.watch = say
    job.wait(lambda: asked, 60.0, "it is rejected")
    job.check(set(asked) == {"Ok"}, f"{asked}")
    job.watch = lambda what, rank, number: None
    if job.rng.random() < 0.5:
        _kills(job, 2)
    _launch_again(job)
    job.check(all(Stamp(*rank._chosen) < bad for rank in job.ranks), f"{bad} is chosen, or what came of it")
    job.sleep(job.rng.uniform(0.0, 6.0))
    job.check(bad not in job.tier.offered(), f"{bad} is offered still")
    job.power_off(job.up)
    _again(job, fresh=True, steps=20)
    _succeed(job)


_LEFT: dict[str, object] = {"nodes": 4, "tier_salvage_s": 3.0, "retention_s": 900.0, "interval_s": 4}


def ill_nodes(job: Job) -> None:
    """Three nodes are ill when the job begins, one of them without power: the prologs name no other node, and that of
    the first node names all of them."""
    hosts = list(job.nodes)
    ill = sorted(job.rng.sample(hosts, 3), key=hosts.index)
    job.nodes[ill[0]].power_off()
    said = {host: answer.split() for host, answer in job.allocate(hosts, ill).items()}
    job.check(all(words[0] == "unmapped" for words in said.values()), f"the prologs said {said}")
    named = {name for words in said.values() for name in words[1:]}
    job.check(named and named <= set(ill), f"{ill} are ill, the prologs said {said}")
    job.check(hosts[0] in ill or said[hosts[0]][1:] == ill, f"{ill} are ill, the first node's prolog said {said}")


STORIES: dict[str, tuple[Callable[[Job], None], dict[str, object]]] = {
    "power": (power, {}),
    "agents_die": (agents_die, {}),
    "bad_tier": (bad_tier, {}),
    "node_lost": (node_lost, _LEFT),
    "comes_back": (comes_back, _LEFT),
    "old_nodes": (old_nodes, {}),
    "ends_again": (ends_again, {"interval_s": 600}),
    "succeeds": (succeeds, {}),
    "kept": (kept, {}),
    "rejected": (rejected, {}),
    "ill_nodes": (ill_nodes, {"nodes": 20}),
}


def tell(name: str, seed: int, broken: str = "") -> Told:
    """What went wrong, or "", and the story. For one process of its own. broken: what does not work (`BROKEN`)."""
    scenario, options = STORIES[name]
    more = {"replicas": 2 + seed % 2} if name in ("node_lost", "comes_back") else {}
    job = Job(seed, **{**options, **more})  # type: ignore[arg-type]
    wrong = ""
    try:
        if broken:
            BROKEN[broken]()
        job.run(scenario)
    except BaseException as error:
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        wrong = f"{type(error).__name__}: {error} {where}"
    finally:
        job.clear()
    return wrong, job.story()


def main() -> int:
    """Return the exit status: 0 where no seed has found anything. Of a single story and seed the story is printed."""
    names = [word for word in sys.argv[1:] if not word.isdecimal()]
    seeds = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    with_equal_hashes("tests.sim.tier_stories")
    wrong = 0
    for name in names:
        for seed in seeds:
            ended = apart(partial(tell, name, seed))
            if len(names) == len(seeds) == 1:
                print(ended.story)
            if ended.problem:
                wrong += 1
                print(f"{name} {seed}: {ended.problem}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
