"""The verb `inspect JOBID`: show a job's protection, the losses that it would survive, and its past recoveries."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gemini_hpc import clock
from gemini_hpc.cli.job_id import UserError, WrongIdError, raw_id
from gemini_hpc.config import CONFIG_PATH, ConfigError, Settings, load
from gemini_hpc.report import columns, history, traffic_text
from gemini_hpc.wire.sanitize import sanitize as _tame

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Any]
    from gemini_hpc.query.inspect_document import Document
    from gemini_hpc.wire.inspect_schema import JobAnswer

MAX_SHARDS_SHOWN = 64
MAX_NAMES_SHOWN = 8
MAX_FATAL_SHOWN = 12


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what protects a job now, and its past recoveries",
        description="Show the replicas of a job: nodes, versions, holders, losses it would survive, past recoveries.",
    )
    parser.add_argument("job", metavar="JOBID", help="job id, or array task as 10_3")
    parser.add_argument("--json", action="store_true", help="print the documented JSON document (schema 1)")
    parser.add_argument(
        "--watch", metavar="S", type=_seconds, nargs="?", const=1.0, help="refresh every S seconds (default 1)"
    )
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.1 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"wanted seconds from 0.1 to 86400, found {text[:40]!r}")


def run(args: argparse.Namespace) -> int:
    """Show the job and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    try:
        job = raw_id(args.job)
        _show(load(args.config), job, args)
    except WrongIdError as exc:
        print(f"gemini-hpc inspect: {exc}", file=sys.stderr)
        return 2
    except (UserError, ConfigError) as exc:
        print(f"gemini-hpc inspect: {_tame(str(exc))}", file=sys.stderr)
        return 1
    return 0


def _show(settings: Settings, job: int, args: argparse.Namespace) -> None:
    source = _AnswerSource(settings, job)
    while True:
        document = source.document()
        if args.watch is not None and sys.stdout.isatty() and not args.json:
            sys.stdout.write("\x1b[2J\x1b[H")
        print(json.dumps(document) if args.json else render(_tame(document), columns.width()), flush=True)
        if args.watch is None:
            return
        clock.sleep(args.watch)


class _AnswerSource:
    """The source of the answers: the controller, or the agents while no controller answers."""

    def __init__(self, settings: Settings, job: int) -> None:
        self._settings, self._job = settings, job
        self._line: Any = None

    def document(self) -> Document:
        from gemini_hpc.query import ask
        from gemini_hpc.query.inspect_document import inspect_document

        asked = "controller"
        try:
            try:
                answer = self._ask()
            except ask.NoControllerError as exc:
                self._line, asked = None, "agents"
                answer = ask.agents(self._settings, self._job)
                if not answer.parts:
                    raise ask.QueryError(f"job {self._job}: no controller ({exc}) and no agent answers") from None
        except ask.QueryError as exc:
            raise UserError(str(exc)) from None
        told, now = (answer.parts, answer.events, answer.slurm, answer.missing), clock.time()
        return inspect_document(self._job, *told, asked, now, answer.lemons)

    def _ask(self) -> JobAnswer:
        """Return the controller's answer, over the previous connection if that still works.

        The controller closes a connection that is silent for a minute. It may also have been restarted since.
        """
        from gemini_hpc.query import ask

        line, self._line = self._line, None
        if line is not None:
            try:
                answer: JobAnswer = line.ask(self._job)
                self._line = line
                return answer
            except ask.NoControllerError:
                line.close()
        self._line = ask.ControllerLine(self._settings, self._job)
        return self._line.ask(self._job)  # type: ignore[no-any-return]


# ---- text ----------------------------------------------------------------------------------------------


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _age(s: float | None) -> str:
    if s is None:
        return "-"
    if s < 120:
        return f"{s:.1f} s"
    return f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"


def _version(v: list[int] | None) -> str:
    return f"{v[0]}:{v[1]}" if v else "-"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]


def render(d: Document, width: int = columns.USUAL) -> str:
    """Return the document as text.

    Sentences are folded to at most `width` columns. Rows of tables are as long as their names require.
    """
    from gemini_hpc.query.inspect_document import how_many

    slurm = d["slurm"]
    reason = f" ({slurm['reason']})" if slurm.get("reason") else ""
    state = f"{d['state']} {how_many(d)}".rstrip()
    head = f"job {d['job']}: {state}   slurm {slurm.get('state') or '?'}{reason}"
    kept = f"replicas {d['replicas'] or '?'}"
    if lost := d.get("parity"):
        kept = f"parity over groups of {d['replicas']} nodes{f', any {lost} of which may be lost' * (lost > 1)}"
    counts = f"restarts {slurm.get('restarts', d['restart'])}   {kept}   epoch {d['epoch']}"
    if d["ended"] and not d["nodes"]:
        counts = f"restarts {d['restart']}"
    counts += f"   (asked: {d['asked']})"
    whole = f"{head}   {counts}"
    lines = [whole] if len(whole) <= width else [*columns.fold(head, width, "    ", ""), f"    {counts}"]
    lines += history.ended(d, width)
    for note in d["notes"]:
        lines += columns.fold(note, width, "    ", "note: ")
    if d["nodes"]:
        lines.append("nodes")
        lines += _table(["rank", "host", "group", "state", "address", "memory"], [_node(n) for n in d["nodes"]])
    for lemon in d.get("lemons", ())[:MAX_NAMES_SHOWN]:
        incidents = f"{lemon['count']} incident{'s' * (lemon['count'] > 1)}"
        what = ", ".join(sorted(set(lemon["what"])))
        lines += columns.fold(f"{lemon['host']} had {incidents} lately: {what}", width, "    ", "")
    if d.get("spares"):
        lines += columns.fold(_spares(d["spares"]), width, "    ", "")
    if d.get("domains"):
        lines += columns.fold(_domains(d["domains"]), width, "    ", "")
    if d.get("after"):
        lines += columns.fold(_after(d["after"]), width, "    ", "")
    for s in d["trainings"]:
        for line in _set(s, len(d["nodes"])):
            lines += columns.fold(line, width, "      ", "") if _words(line) else [line]
    for r in d["recoveries"]:
        lines += history.recovery(r, width)
    return "\n".join(lines)


def _spares(s: Document) -> str:
    idle = f": {', '.join(s['idle'])}" if s["idle"] else ""
    without = f"; the job goes on without {', '.join(s['without'])}" if s["without"] else ""
    return f"spares {len(s['idle'])} of {s['wanted']}{idle}{without}"


def _domains(d: Document) -> str:
    said = [f"{_and(s['hosts'])} share {s['domain']}" for s in d["shared"][:MAX_NAMES_SHOWN]]
    more = len(d["shared"]) - len(said) + d["more"]
    said += [f"and {more} more group{'s' * (more > 1)}"] if more else []
    return f"failure domains: {'; '.join(said) or 'no group has two nodes of one'} (known of {d['known']} nodes)"


def _and(names: list[str]) -> str:
    shown = names[:MAX_NAMES_SHOWN] + (
        [f"{len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    )
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def _after(a: Document) -> str:
    taken = [f"{t['name']} version {_version(t['version'])}" for t in a["took_over"][:MAX_NAMES_SHOWN]]
    return f"goes on from job {a['job']}: {'; '.join([*taken, *([a['lost']] if a['lost'] else [])]) or 'nothing yet'}"


def _words(line: str) -> bool:
    """Return whether a line is a sentence rather than a row of a table."""
    return ": " in line or "; " in line


def _node(n: Document) -> list[str]:
    place = f"{n['address']} ({n['interface']})" if n["interface"] else n["address"] or "-"
    memory = f"{_bytes(n['memory_bytes'])} of {_bytes(n['memory_cap_bytes'])}" if n["agent"] else "-"
    state = n["state"] + ("" if n["member"] else ", no longer in the job")
    if n["dead"] or n["suspects"]:
        state += f" (dead: {','.join(n['dead']) or '-'}; suspects: {','.join(n['suspects']) or '-'})"
    rank = "-" if n["node_rank"] is None else str(n["node_rank"])
    return [rank, n["host"], "-" if n["group"] is None else str(n["group"]), state, place, memory]


def _set(s: Document, nodes: int) -> list[str]:
    lines = [
        f"training {s['name']}: {s['state']}{_stalled(s['stalled'])}, world {s['world']}, "
        f"sealed {_version(s['sealed'])}"
    ]
    lines += [f"  hangs: {s['stalled']['hung']}"] if s["stalled"] and s["stalled"].get("hung") else []
    lines += [f"  note: {note}" for note in s["notes"]]
    lines += _tier(s.get("tier"))
    lines += [f"  {line}" for line in traffic_text.lines(s["traffic"])]
    rows = []
    for shard in s["shards"][:MAX_SHARDS_SHOWN]:
        for i, h in enumerate(shard["holders"] or [None]):
            first = [str(shard["rank"]), str(shard["home"]), _bytes(shard["bytes"])] if i == 0 else ["", "", ""]
            if h is None:
                rows.append([*first, "nobody", "", "", "", ""])
            else:
                times = [_age(h["age_s"]), _age(h["verified_age_s"])]
                rows.append([*first, h["host"], h["state"], _version(h["version"]), *times])
        if parity := shard.get("parity"):
            of = "+".join(map(str, parity["of"]))
            for h in parity["holders"]:
                times = [_age(h["age_s"]), _age(h["verified_age_s"])]
                rows.append(
                    [f"^{of}", "", _bytes(parity["bytes"]), h["host"], h["state"], _version(h["version"]), *times]
                )
    lines += _table(["shard", "home", "size", "holder", "state", "version", "age", "verified"], rows)
    if len(s["shards"]) > MAX_SHARDS_SHOWN:
        lines.append(f"  ... and {len(s['shards']) - MAX_SHARDS_SHOWN} more shards (--json has them all)")
    return lines + _survival(s["survival"], nodes)


def _stalled(s: Document | None) -> str:
    return f": no step for {_age(s['for_s'])} (usually {_age(s['usual_s'])})" if s else ""


def _tier(t: Document | None) -> list[str]:
    if t is None:
        return []
    kept = f"version {_version(t['version'])}, {_age(t['age_s'])} old" if t["version"] else "nothing yet"
    saving = f"; saving {_version(t['saving'])}, {_bytes(t['written_bytes'])} written" if t["saving"] else ""
    problem = [f"  tier: not saved: {t['problem']}"] if t["problem"] else []
    every = [f"  tier: every {_age(t['interval_s'])}: {t['interval_reason']}"] if t.get("interval_s") else []
    named = [f"{k['name']} (version {_version(k['version'])})" for k in t.get("kept", ())[-MAX_NAMES_SHOWN:]]
    named += [f"{name} (on its way)" for name in t.get("keeping", ())[:MAX_NAMES_SHOWN]]
    return [
        f"  tier {t['directory']}: {kept}{saving}",
        *every,
        *([f"  kept: {', '.join(named)}"] if named else []),
        *problem,
    ]


def _share(k: int, probability: float) -> str:
    what = f"{k} node{'s' * (k > 1)}"
    if probability in (0.0, 1.0):
        return f"{'any' if probability else 'never'} {what}"
    return f"{what} in {100 * probability:.4g} % of the cases"


def _survival(v: Document, nodes: int) -> list[str]:
    if v["lost_already"]:
        return ["  may be lost: nothing yet"]
    shares = ", ".join(_share(row["k"], row["probability"]) for row in v["survives"])
    lines = [f"  may be lost: {shares} (exact, for version {_version(v['counted_version'])})"]
    fatal = ["+".join(f) for f in v["fatal"] if len(f) <= nodes]
    if fatal:
        more = f" and {len(fatal) - MAX_FATAL_SHOWN} more" if len(fatal) > MAX_FATAL_SHOWN else ""
        lines.append(f"  never together: {', '.join(fatal[:MAX_FATAL_SHOWN])}{more}")
    if live := v.get("live"):
        shares = ", ".join(_share(row["k"], row["probability"]) for row in live["survives"])
        lines.append(f"  while all ranks run, their tensors count as copies: {shares}; not during optimizer.step()")
    return lines
