"""The verb `inspect JOBID`: show a job's protection, the losses that it would survive, and its past recoveries."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.cli import frame, live_view
from gemini_hpc.cli.amounts import build_number_parser
from gemini_hpc.durations import format_age
from gemini_hpc.report import columns, summary, traffic_text
from gemini_hpc.wire.sanitize import sanitize

if TYPE_CHECKING:
    from gemini_hpc.query.inspect_document import Document

MAX_NAMES_SHOWN = 8
MAX_NODES_SHOWN = 8
MAX_FATAL_SHOWN = 6
MAX_RECOVERIES_SHOWN = 2


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "inspect",
        run,
        "gemini-hpc inspect 42",
        "gemini-hpc inspect 42 --watch",
        "gemini-hpc inspect 10_3 --json",
        help="show what protects a job now, and its past recoveries",
        description="Show a job's state, the nodes that may be lost now, and what to do; then its trainings, nodes "
        "and recoveries. --full lists every node, every shard with its holders, and every event of a recovery.",
    )
    frame.add_job(parser)
    parser.add_argument("--full", action="store_true", help="list every node, shard and event of a recovery")
    frame.add_json(parser)
    parser.add_argument(
        "--watch",
        metavar="S",
        type=build_number_parser(0.1, 86400),
        nargs="?",
        const=1.0,
        help="refresh every S seconds (default 1)",
    )
    frame.add_config(parser)


def run(args: argparse.Namespace) -> frame.Result | int:
    """Show the job. With --watch, return the exit status 0 when the user ends the view."""
    from gemini_hpc.query import ask

    settings, job = frame.find_job(args)
    source = ask.AnswerSource(settings)

    def build_result() -> frame.Result:
        answer, failure = source.ask(job)
        if failure is not None and not answer.parts:
            why = f"no controller ({failure}) and no agent answers: it has ended, or is not protected"
            raise ask.QueryError(f"job {job}: {why}")
        asked = "controller" if failure is None else "agents"
        document = ask.describe_answer(job, answer, asked, clock.time())
        return frame.Result(document, lambda d: render(sanitize(d), columns.measure_width(), full=args.full))

    if args.watch is None:
        return build_result()
    live_view.show_live(lambda: build_result().format(args.json), args.watch, plain=args.json)
    return 0


# ---- text ----------------------------------------------------------------------------------------------


def _format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _format_version(v: list[int] | None) -> str:
    return f"{v[0]}:{v[1]}" if v else "-"


def _format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return columns.align([head, *rows], "  ")


def render(d: Document, width: int = columns.USUAL, *, full: bool = False) -> str:
    """Return the document as text.

    Sentences are folded to at most `width` columns. Rows of tables are as long as their names require.

    Args:
        d: The document, without control characters (`sanitize`).
        width: Columns of the terminal.
        full: Whether to list every node, every shard with its holders, and every event of a recovery.
    """
    lines = summary.format_summary(d, width) + summary.format_end(d, width)
    for note in d["notes"]:
        lines += columns.fold(note, width, "    ", "note: ")
    for s in d["trainings"]:
        for line in _describe_training(s, full=full):
            lines += columns.fold(line, width, "      ", "") if _is_sentence(line) else [line]
    lines += _format_node_table(d["nodes"], full=full)
    lines += columns.fold(used, width, "    ", "") if (used := _describe_cpu(d["nodes"])) else []
    for lemon in d.get("lemons", ())[:MAX_NAMES_SHOWN]:
        incidents = f"{lemon['count']} incident{'s' * (lemon['count'] > 1)}"
        what = ", ".join(sorted(set(lemon["kinds"])))
        lines += columns.fold(f"{lemon['host']} had {incidents} lately: {what}", width, "    ", "")
    if d.get("spares"):
        lines += columns.fold(_describe_spares(d["spares"]), width, "    ", "")
    if d.get("domains"):
        lines += columns.fold(_describe_domains(d["domains"]), width, "    ", "")
    if d.get("after"):
        lines += columns.fold(_describe_predecessor(d["after"]), width, "    ", "")
    for r in d["recoveries"] if full else d["recoveries"][-MAX_RECOVERIES_SHOWN:]:
        lines += (
            summary.format_recovery(r, width) if full else columns.fold(summary.format_headline(r), width, "    ", "")
        )
    return "\n".join(lines)


def _format_node_table(nodes: list[Document], *, full: bool) -> list[str]:
    """Return the table of nodes. Nodes in trouble come first where not all are shown."""
    if not nodes:
        return []
    shown = nodes
    if not full and len(nodes) > MAX_NODES_SHOWN:
        well = [n["agent"] and n["member"] and not n["dead"] and not n["suspects"] for n in nodes]
        shown = [n for _, n in sorted(zip(well, nodes, strict=True), key=lambda pair: pair[0])][:MAX_NODES_SHOWN]
    lines = [
        "nodes",
        *_format_table(["rank", "host", "group", "state", "address", "memory"], [_format_node(n) for n in shown]),
    ]
    rest = len(nodes) - len(shown)
    return [*lines, f"  and {rest} more (--full)"] if rest else lines


def _describe_spares(s: Document) -> str:
    idle = f": {', '.join(s['idle'])}" if s["idle"] else ""
    without = f"; the job goes on without {', '.join(s['without'])}" if s["without"] else ""
    return f"spares {len(s['idle'])} of {s['wanted']}{idle}{without}"


def _describe_domains(d: Document) -> str:
    groups = [f"{_join_names(s['hosts'])} share {s['domain']}" for s in d["shared"][:MAX_NAMES_SHOWN]]
    more = len(d["shared"]) - len(groups) + d["more"]
    groups += [f"and {more} more group{'s' * (more > 1)}"] if more else []
    return f"failure domains: {'; '.join(groups) or 'no group has two nodes of one'} (known of {d['known']} nodes)"


def _join_names(names: list[str]) -> str:
    shown = names[:MAX_NAMES_SHOWN] + (
        [f"{len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    )
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def _describe_predecessor(a: Document) -> str:
    taken = [f"{t['name']} version {_format_version(t['version'])}" for t in a["took_over"][:MAX_NAMES_SHOWN]]
    return f"goes on from job {a['job']}: {'; '.join([*taken, *([a['lost']] if a['lost'] else [])]) or 'nothing yet'}"


def _is_sentence(line: str) -> bool:
    """Return whether a line is a sentence rather than a row of a table."""
    return ": " in line or "; " in line


def _format_node(n: Document) -> list[str]:
    place = f"{n['address']} ({n['interface']})" if n["interface"] else n["address"] or "-"
    place += f" RDMA {n['rdma'].partition(';')[0]}" if n.get("rdma") and not n["rdma"].startswith("TCP") else ""
    memory = f"{_format_bytes(n['memory_bytes'])} of {_format_bytes(n['memory_cap_bytes'])}" if n["agent"] else "-"
    state = n["state"] + ("" if n["member"] else ", no longer in the job")
    if n["dead"] or n["suspects"]:
        state += f" (dead: {','.join(n['dead']) or '-'}; suspects: {','.join(n['suspects']) or '-'})"
    rank = "-" if n["node_rank"] is None else str(n["node_rank"])
    return [rank, n["host"], "-" if n["group"] is None else str(n["group"]), state, place, memory]


def _describe_cpu(nodes: list[Document]) -> str:
    """Return what the busiest agent takes of its node's processors; "" if no agent tells."""
    busy = [n for n in nodes if n.get("cpu")]
    if not busy:
        return ""
    host, cpu = max(((n["host"], n["cpu"]) for n in busy), key=lambda row: float(row[1]["cores"]))
    text = (
        f"processors: the agent on {host} uses {cpu['cores']:.2g} cores of the {cpu['allowed_cores']:.2g} that it may"
    )
    if cpu["version_s"] is not None:
        text += f"; {cpu['version_s']:.2g} core-seconds a version"
        text += f", {cpu['gb_s']:.2g} a GB of copies" if cpu["gb_s"] is not None else ""
    return text


def _describe_training(s: Document, *, full: bool) -> list[str]:
    lines = [
        f"training {s['name']}: {s['state']}{_describe_stall(s['stalled'])}, world {s['world']}, "
        f"sealed {_format_version(s['sealed'])}"
    ]
    lines += [f"  hangs: {s['stalled']['hung']}"] if s["stalled"] and s["stalled"].get("hung") else []
    lines += [f"  note: {note}" for note in s["notes"]]
    lines += _describe_tier(s.get("tier"))
    lines += [f"  {line}" for line in traffic_text.format_traffic(s["traffic"])]
    lines += _format_shard_table(s) if full else _summarize_shards(s)
    lines += _describe_survival(s["survival"], full=full)
    if live := s["survival"].get("live"):
        shares = ", ".join(summary.format_share(row["k"], row["probability"]) for row in live["survives"])
        lines.append(f"  while all ranks run, their tensors count as copies: {shares}; not during optimizer.step()")
    return lines


def _format_shard_table(s: Document) -> list[str]:
    rows = []
    for shard in s["shards"]:
        first = [str(shard["rank"]), str(shard["home"]), _format_bytes(shard["bytes"])]
        for holder in [_format_holder(h) for h in shard["holders"]] or [["nobody", "", "", "", ""]]:
            rows.append([*first, *holder])
            first = ["", "", ""]
        if parity := shard.get("parity"):
            first = ["^" + "+".join(map(str, parity["members"])), "", _format_bytes(parity["bytes"])]
            rows += [[*first, *_format_holder(h)] for h in parity["holders"]]
    return _format_table(["shard", "home", "size", "holder", "state", "version", "age", "verified"], rows)


def _format_holder(h: Document) -> list[str]:
    times = [format_age(h["age_s"]), format_age(h["verified_age_s"])]
    return [h["host"], h["state"], _format_version(h["version"]), *times]


def _summarize_shards(s: Document) -> list[str]:
    """Return how many nodes hold the counted version of how many shards."""
    if not (counted := s["survival"]["counted_version"]):
        return []
    holders = Counter(len({h["host"] for h in x["holders"] if h["version"] == counted}) for x in s["shards"])
    held = [f"{count} on {n} node{'s' * (n != 1)}" for n, count in sorted(holders.items())]
    size = _format_bytes(sum(x["bytes"] for x in s["shards"]))
    return [f"  version {_format_version(counted)}: {len(s['shards'])} shards of {size} together, {', '.join(held)}"]


def _describe_stall(s: Document | None) -> str:
    return f": no step for {format_age(s['for_s'])} (usually {format_age(s['usual_s'])})" if s else ""


def _describe_tier(t: Document | None) -> list[str]:
    if t is None:
        return []
    kept = f"version {_format_version(t['version'])}, {format_age(t['age_s'])} old" if t["version"] else "nothing yet"
    saving = (
        f"; saving {_format_version(t['saving'])}, {_format_bytes(t['written_bytes'])} written" if t["saving"] else ""
    )
    problem = [f"  tier: not saved: {t['problem']}"] if t["problem"] else []
    every = [f"  tier: every {format_age(t['interval_s'])}: {t['interval_reason']}"] if t.get("interval_s") else []
    named = [f"{k['name']} (version {_format_version(k['version'])})" for k in t.get("kept", ())[-MAX_NAMES_SHOWN:]]
    named += [f"{name} (being saved)" for name in t.get("keeping", ())[:MAX_NAMES_SHOWN]]
    return [
        f"  tier {t['directory']}: {kept}{saving}",
        *every,
        *([f"  kept: {', '.join(named)}"] if named else []),
        *problem,
    ]


def _describe_survival(v: Document, *, full: bool) -> list[str]:
    if v["lost_already"]:
        return ["  may be lost: nothing yet"]
    lines = []
    if full:
        shares = ", ".join(summary.format_share(row["k"], row["probability"]) for row in v["survives"])
        lines.append(f"  may be lost: {shares} (exact, for version {_format_version(v['counted_version'])})")
    fatal = ["+".join(f) for f in v["fatal"]]
    shown = fatal if full else fatal[:MAX_FATAL_SHOWN]
    more = f" and {len(fatal) - len(shown)} more" if len(fatal) > len(shown) else ""
    return [*lines, f"  never together: {', '.join(shown)}{more}"] if fatal else lines
