"""The state of one job as a JSON document: a pure merge of the reports of agents, controller and Slurm.

Schema 1 (`gemini-hpc inspect --json`; keys are only ever added to it). Times are Unix seconds, ages seconds,
sizes bytes, a version is [epoch, version] or null:

  schema, job, asked ("controller" or "agents"), t, state, replicas, epoch, restart, kept_until (or null)
  slurm       {state, nodes, restarts, reason, requeue, user, partition, note, ...}: strings, as Slurm has them
  spares      null, or {wanted, idle: [host], without: [host]}
  domains     null, or {known, shared: [{domain, hosts: [host]}], more}: groups that share a failure domain
  after       null, or {job, took_over: [{name, version}], lost}: the job from which this one continues
  lemons      [{host, count, last, what: [word]}]: nodes of the job that caused failures before
  nodes       [{node_rank, host, group, state, agent, address, interface, port, memory_bytes, memory_cap_bytes,
                cpu: {cores, allowed_cores, version_s, gb_s} or null, rdma, suspects, dead, member}]
  ended       null, or {state, t, exit_code, version, stored}: how the job ended
  trainings   [{name, world, sealed, state, protected, stalled: {for_s, usual_s, hung} or null, notes,
                shards: [{rank, home, bytes, holders: [{host, state, version, age_s, verified_age_s}]}],
                survival: {counted_version, survives: [{k, probability}], fatal: [[host]],
                exact, lost_already}, tier: {directory, version, age_s, saving, written_bytes, problem, keeping,
                kept: [{name, version}], interval_s, interval_reason} or null,
                traffic: [{rank, host, and the fields of `wire.traffic.TrafficState`}]}]
  recoveries  [{restart, began, total_s, completed, events: [{t, after_s, gap_s, name, host, detail}]}]
  events      [{t, name, host, restart, version, detail}]
  missing     hosts of the job without an answer;   notes   sentences for the reader
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gemini_hpc.core.redundancy import format_kind
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.survival import Survival, compute_survival
from gemini_hpc.durations import format_time
from gemini_hpc.query import past
from gemini_hpc.query.losses import Losses, Slots
from gemini_hpc.query.stall import Stall, detect_stall
from gemini_hpc.wire.inspect_schema import EventRecord, HeldSlot, InspectPart, LemonRow, TierState
from gemini_hpc.wire.sanitize import bound_event
from gemini_hpc.wire.traffic import TrafficState

SCHEMA = 1
PARTLY = "partly protected"
PENDING = "pending"  # the job waits for its first start
MAX_TRAININGS, MAX_SHARDS = 256, 1 << 17
Document = dict[str, Any]


def build_inspect_document(
    job: int,
    parts: Sequence[InspectPart],
    events: Iterable[EventRecord],
    slurm: dict[str, str],
    missing: Iterable[str],
    asked: str,
    now: float,
    lemons: Iterable[LemonRow] = (),
) -> Document:
    """Return the document of a job.

    Parts of an older incarnation count only if no newer incarnation has their host.
    """
    restart = max((p.restart for p in parts), default=int(slurm.get("restarts", "0") or 0))
    newest: dict[str, InspectPart] = {}
    for part in sorted(parts, key=lambda p: (p.restart, p.round)):
        newest[part.host] = part
    parts = list(newest.values())
    leader = max(parts, key=lambda p: (p.restart, p.epoch, p.round), default=None)
    members = [h for h in slurm.get("nodes", "").split(",") if h] or list(leader.hosts if leader else ())
    ranks = dict(leader.noderanks) if leader else {}
    absent = sorted({h for h in members if h not in newest} | set(missing))
    names = _choose_trainings(parts)
    trainings = [_build_training(name, parts, members, now, slurm) for name in names]
    document: Document = {
        "schema": SCHEMA,
        "job": job,
        "asked": asked,
        "t": now,
        "state": _derive_state(parts, absent, trainings, slurm),
        "ended": None,
        "replicas": leader.replicas if leader else 0,
        "redundancy": format_kind(leader.parity if leader else 0),
        "parity": leader.parity if leader else 0,
        "epoch": max((p.epoch for p in parts), default=0),
        "restart": restart,
        "slurm": dict(slurm),
        "spares": _build_spares(leader),
        "after": _build_predecessor(leader),
        "domains": _build_domains(leader),
        "lemons": [msgspec.structs.asdict(row) | {"kinds": list(row.kinds)} for row in lemons],
        "nodes": _build_nodes(parts, members, absent, ranks, _number_groups(parts, ranks)),
        "trainings": trainings,
        "missing": absent,
        "notes": [],
    }
    log = past.merge_events([*events, *(bound_event(e, p.host) for p in parts for e in p.events)])
    if (how := past.derive_end(log, slurm)) is not None:
        document["state"], document["ended"] = past.ENDED, _build_end(how)
        if not parts:  # its agents have ended with the job
            document["restart"] = max([restart, *(e.restart for e in log)])
            document["missing"], document["nodes"] = [], []
    document["recoveries"] = past.list_recoveries(log)
    document["events"] = [msgspec.structs.asdict(e) for e in log]
    document["kept_until"] = min((p.kept_until for p in parts if p.kept_until), default=None)
    if not document["kept_until"] and document["ended"] is None and slurm.get("state") != "RUNNING":
        # Slurm counts a requeue at once, so the freed copies are of the previous incarnation then.
        document["notes"] += [
            lost
            for lost in (past.describe_freed_copies(log, restart) or past.describe_freed_copies(log, restart - 1),)
            if lost
        ]
    waiting = [f"unprotected, because {p.host}'s {p.unprotected[:500]}" for p in parts if p.unprotected]
    troubled = [f"{p.host}: {p.problem[:500]}" for p in parts if p.problem]
    rdma = [f"{p.host} pushes over TCP instead of RDMA: {p.rdma[:500]}" for p in parts if "TCP" in p.rdma]
    document["notes"] += [*_list_notes(document, document["missing"], slurm), *waiting, *troubled, *rdma]
    if unshown := len({s.name for p in parts for s in p.trainings}) - len(names):
        document["notes"].append(f"{unshown} trainings are not shown: the agents report more ranks than is possible")
    return document


def _build_spares(leader: InspectPart | None) -> Document | None:
    """Return the spares; None for a job without spares, and before its agents agree on the spares."""
    if leader is None or not leader.spares or not leader.noderanks:
        return None
    idle = [host for host in leader.hosts if host not in leader.noderanks]
    return {"wanted": leader.spares, "idle": idle, "without": list(leader.without)}


def _build_predecessor(leader: InspectPart | None) -> Document | None:
    """Return the job from which this one continues, None if it was not submitted to continue one."""
    if leader is None or not leader.after:
        return None
    taken = [{"name": name, "version": list(stamp)} for name, stamp in leader.taken[:MAX_TRAININGS]]
    return {"job": leader.after, "took_over": taken, "lost": leader.not_taken[:500]}


def _build_domains(leader: InspectPart | None) -> Document | None:
    """Return the shared failure domains, None if no failure domain is known."""
    if leader is None or leader.domains is None:
        return None
    shared = [{"domain": s.domain, "hosts": list(s.hosts)} for s in leader.domains.shared]
    return {"known": leader.domains.known, "shared": shared, "more": leader.domains.more}


def _choose_trainings(parts: Sequence[InspectPart]) -> list[str]:
    """Return the names of the trainings to show, limited to a size that an operator's terminal can display.

    The limit is necessary because agents belong to users, who could report anything.
    """
    worlds: dict[str, int] = {}
    for part in parts:
        for s in part.trainings:
            worlds[s.name] = max(worlds.get(s.name, 0), s.world)
        for slot in part.held:
            if slot.training in worlds:
                worlds[slot.training] = max(worlds[slot.training], slot.world)
    shown: list[str] = []
    left = MAX_SHARDS
    for name in sorted(worlds):
        if worlds[name] <= left and len(shown) < MAX_TRAININGS:
            left -= worlds[name]
            shown.append(name)
    return shown


def _build_end(how: past.JobEnd) -> Document:
    return {
        "state": how.state,
        "t": how.t or None,
        "exit_code": how.exit_code,
        "version": how.version or None,
        "stored": how.stored or None,
    }


def _derive_state(
    parts: Sequence[InspectPart], absent: Sequence[str], trainings: Sequence[Document], slurm: dict[str, str]
) -> str:
    if not parts and slurm.get("state") in ("PENDING", "CONFIGURING") and slurm.get("restarts", "0") == "0":
        return PENDING
    if not parts or any(p.unprotected for p in parts):
        return "unprotected"
    states = {s["state"] for s in trainings}
    some = 0 < count_protected(trainings) < len(trainings) and "recovering" not in states
    if some and slurm.get("state") == "RUNNING":
        return PARTLY
    if any(s["survival"]["lost_already"] for s in trainings) or not trainings:
        return "arming" if slurm.get("state") in ("RUNNING", "CONFIGURING", "") else "waiting"
    if absent:
        return PARTLY
    for word in ("degraded", "recovering", "stalled", "arming"):
        if word in states:
            return word
    return "protected"


def count_protected(trainings: Iterable[Document]) -> int:
    """Return how many trainings would come back after a failure."""
    return sum(s["protected"] for s in trainings)


def format_protected_count(d: Document) -> str:
    """Return a text for the state of a job that holds for only some of its trainings, or ""."""
    safe, every = count_protected(d["trainings"]), len(d["trainings"])
    return f"({safe} of {every} trainings)" if d["state"] == PARTLY and safe < every else ""


def _number_groups(parts: Sequence[InspectPart], ranks: dict[str, int]) -> dict[str, int]:
    """Return the group number of each node; nodes that hold copies for each other form a group.

    Groups are numbered in the order of their lowest node ranks.
    """
    home = {rank: host for host, rank in ranks.items()}
    group = {host: {host} for host in ranks}
    for part in parts:
        for owner in (home.get(node) for slot in part.held for node in _list_homes(slot)):
            if owner is None or part.host not in group or group[owner] is group[part.host]:
                continue
            merged = group[owner] | group[part.host]
            for host in merged:
                group[host] = merged
    order = sorted({min(ranks[h] for h in g) for g in group.values()})
    return {host: order.index(min(ranks[h] for h in g)) for host, g in group.items()}


def _list_homes(slot: HeldSlot) -> list[int]:
    """Return the node ranks whose shards are in a slot."""
    if slot.state == "empty":
        return []
    return [node for _, node in slot.members] if slot.members else [slot.home]


def _build_nodes(
    parts: Sequence[InspectPart],
    members: Sequence[str],
    absent: Sequence[str],
    ranks: dict[str, int],
    groups: dict[str, int],
) -> list[Document]:
    rows: list[Document] = []
    for p in parts:
        rows.append(
            {
                "node_rank": ranks.get(p.host, p.noderanks.get(p.host)),
                "host": p.host,
                "group": groups.get(p.host),
                "state": p.state,
                "agent": True,
                "address": p.address,
                "interface": p.interface,
                "port": p.port,
                "memory_bytes": p.memory_bytes,
                "memory_cap_bytes": p.memory_cap_bytes,
                "cpu": msgspec.structs.asdict(p.cpu) if p.cpu is not None else None,
                "rdma": p.rdma[:500],
                "suspects": list(p.suspects),
                "dead": list(p.dead),
                "member": p.host in members,
            }
        )
    for host in absent:
        row = dict.fromkeys(("address", "interface", "rdma"), "") | dict.fromkeys(
            ("port", "memory_bytes", "memory_cap_bytes"), 0
        )
        facts = {"node_rank": ranks.get(host), "host": host, "group": groups.get(host), "state": "no agent"}
        rows.append(
            {**facts, "agent": False, **row, "cpu": None, "suspects": [], "dead": [], "member": host in members}
        )
    return sorted(rows, key=lambda r: (r["node_rank"] is None, r["node_rank"] or 0, r["host"]))


def _build_tier(t: TierState, now: float) -> Document:
    return {
        "directory": t.directory,
        "version": list(t.stored) if t.stored else None,
        "age_s": max(0.0, now - t.time) if t.stored else None,
        "saving": list(t.saving) if t.saving else None,
        "written_bytes": t.written,
        "problem": t.problem,
        "keeping": list(t.keeping),
        "kept": [{"name": name, "version": list(stamp)} for name, stamp in t.kept],
        "interval_s": t.interval_s or None,
        "interval_reason": t.interval_reason,
    }


def _read_running_s(slurm: dict[str, str]) -> float | None:
    """Return how many seconds the job has run without a pause.

    The result is None if that is unknown, and 0.0 if the job does not run.
    """
    if slurm.get("state") != "RUNNING":
        return 0.0 if slurm.get("state") else None
    running_s = slurm.get("running_s", "")
    return float(running_s) if running_s.isdigit() else None


def _build_training(
    name: str, parts: Sequence[InspectPart], members: Sequence[str], now: float, slurm: dict[str, str]
) -> Document:
    states = [s for p in parts for s in p.trainings if s.name == name]
    every = [(p.host, slot) for p in parts for slot in p.held if slot.training == name and slot.state != "empty"]
    held, parity = [x for x in every if not x[1].members], [x for x in every if x[1].members]
    world = max([s.world for s in states] + [slot.world for _, slot in held], default=0)
    sealed = max((s.sealed for s in states if s.sealed is not None), default=None)
    by_rank: dict[int, list[tuple[str, HeldSlot]]] = {rank: [] for rank in range(world)}
    for host, slot in held:
        by_rank.setdefault(slot.rank, []).append((host, slot))
    hosts = sorted(set(members) | {host for host, _ in every})
    losses = Losses(by_rank, parity)
    counted = losses.choose_counted_version()
    found = compute_survival(hosts, losses.list_fatal_losses(counted))
    live = {
        rank: {p.host for p in parts for s in p.trainings if s.name == name and rank in s.live} for rank in by_rank
    }
    order = ("recovering", "degraded", "arming", "protected", "finished")
    state = next((w for w in order if any(s.state == w for s in states)), "arming")
    traffic = collect_traffic(name, parts)
    paces = [s.pace for s in states if s.pace is not None]
    interval = max((state.j for _, state in traffic.values()), default=1)
    least_s = max((pace.stalled_s for pace in paces), default=0.0)
    if slurm.get("shrunk") and state in ("arming", "protected") and world > len(members):
        # Ranks of this launch were on nodes that the job has lost: no newer version will ever be sealed.
        state = "degraded"
    still = (
        detect_stall(paces, interval, _read_running_s(slurm), least_s) if state in ("arming", "protected") else None
    )
    # only the agent of the hanging rank knows the place of its stack
    hung = max((s.hung for s in states), key=len, default="") if state not in ("recovering", "finished") else ""
    if hung and still is None:
        still = Stall(min((p.silent_s for p in paces), default=0.0), max((p.usual_s for p in paces), default=0.0))
    return {
        "name": name,
        "world": world,
        "sealed": list(sealed) if sealed else None,
        "state": "stalled" if still else state,
        "protected": not found.lost_already and state in ("protected", "finished"),
        "stalled": _build_stall(still, hung) if still else None,
        "notes": sorted({s.note for s in states if s.note}),
        "shards": [
            _build_shard(rank, copies, [x for x in parity if x[1].rank == rank], sealed, now)
            for rank, copies in sorted(by_rank.items())
        ],
        "survival": {
            "counted_version": list(counted) if counted else None,
            **_build_survival(found),
            "exact": True,
            "lost_already": found.lost_already,
            "live": _build_survival(compute_survival(hosts, losses.list_fatal_losses(counted, live)))
            if any(live.values())
            else None,
        },
        "tier": next((_build_tier(s.tier, now) for s in states if s.tier is not None), None),
        "traffic": [
            {"rank": rank, "host": host, **build_traffic_fields(state)}
            for rank, (host, state) in sorted(traffic.items())
            if rank < world
        ],
    }


def _build_survival(found: Survival) -> Document:
    return {
        "survives": [{"k": k, "probability": p} for k, p in enumerate(found.probability, 1)],
        "fatal": [list(f) for f in found.fatal],
    }


def _build_stall(still: Stall, hung: str) -> Document:
    return {"for_s": round(still.for_s, 1), "usual_s": round(still.usual_s, 3), "hung": hung or None}


def collect_traffic(name: str, parts: Iterable[InspectPart]) -> dict[int, tuple[str, TrafficState]]:
    """Return each rank's traffic in a training, with its host; a rank that has moved counts at its last host."""
    found: dict[int, tuple[str, TrafficState]] = {}
    for part in sorted(parts, key=lambda p: (p.restart, p.epoch, p.round)):
        for s in part.trainings:
            if s.name == name:
                found.update((rank, (part.host, state)) for rank, state in s.traffic)
    return found


def build_traffic_fields(state: TrafficState) -> Document:
    """Return a traffic state in the form of the document."""
    return msgspec.structs.asdict(state) | {"chunks_per_span": list(state.chunks_per_span)}


def _build_shard(rank: int, copies: Slots, parity: Slots, sealed: Stamp | None, now: float) -> Document:
    first = copies[0][1] if copies else None
    size = max((slot.used or slot.bytes for _, slot in copies), default=0)
    members = sorted({member for _, slot in parity for member, _ in slot.members})
    return {
        "rank": rank,
        "home": first.home if first else None,
        "bytes": size,
        "holders": _build_holders(copies, sealed, now),
        "parity": {
            "members": members,
            "bytes": max(slot.used or slot.bytes for _, slot in parity),
            "holders": _build_holders(parity, sealed, now),
        }
        if members
        else None,
    }


def _build_holders(copies: Slots, sealed: Stamp | None, now: float) -> list[Document]:
    rows: list[Document] = []
    for host, slot in sorted(copies, key=lambda c: (c[0], c[1].stamp or (0, 0))):
        state = "sealed" if slot.state == "complete" and sealed and slot.stamp == sealed else slot.state
        rows.append(
            {
                "host": host,
                "state": state,
                "version": list(slot.stamp) if slot.stamp else None,
                "age_s": round(max(0.0, now - slot.since), 3) if slot.since else None,
                "verified_age_s": round(max(0.0, now - slot.verified), 3) if slot.verified else None,
            }
        )
    return rows


def _format_clock(t: float, now: float) -> str:
    """Return the time of day, with the date if it is not today's."""
    same = time.localtime(t)[:3] == time.localtime(now)[:3]
    return format_time(t, "%H:%M" if same else "%b %d %H:%M")


def _list_notes(document: Document, absent: Sequence[str], slurm: dict[str, str]) -> list[str]:
    notes = [slurm["note"]] if slurm.get("note") else []
    if document["kept_until"]:
        notes.append(f"copies are kept until {_format_clock(document['kept_until'], document['t'])}")
    if absent and document["nodes"]:
        some = len(absent) < len([n for n in document["nodes"] if n["member"]])
        notes.append(f"{'partly protected: ' if some else ''}no agent on {', '.join(absent)}")
    for s in document["trainings"]:
        if s["survival"]["lost_already"]:
            empty = [str(d["rank"]) for d in s["shards"] if not d["holders"]]
            which = f" (nothing of rank {', '.join(empty)})" if empty else ""
            notes.append(f"training {s['name']}: no version has a complete copy of every shard yet{which}")
    return notes
