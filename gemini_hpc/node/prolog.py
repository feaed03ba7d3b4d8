"""The prolog's work on one node: find or start an agent for this incarnation of the job.

    python3 -I -m gemini_hpc.node.prolog JOB UID RESTART REPLICAS NODE NODELIST TIER TIER_INTERVAL HANG SPARES \
        AFTER REDUNDANCY KEY CLUSTER CPUS GPUS SLURM_CONF

`prolog_epilog/prolog`, which has checked the integers, calls it as root. All arguments but the first six may be
empty. Root removes leftovers of dead jobs, makes the job's directory, and starts the agent in a cgroup of its own.
All access to the content of the job's directory happens in a child that has become the job's owner for good.

Exit status: 0; or `EXIT_STRICT` if gemini.toml sets strict_prolog = true and no agent can be started here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import stat
import sys
from dataclasses import dataclass
from functools import partial

from gemini_hpc import clock, lines
from gemini_hpc.config import ConfigError, Settings, load_site_settings
from gemini_hpc.core import node_share
from gemini_hpc.node import (
    ask_agent,
    cgroup,
    job_directory,
    ledger,
    oom,
    privileges,
    reaper,
    share,
    spawn,
    stale_jobs,
    step_leftovers,
)
from gemini_hpc.node.complaint import log_fault
from gemini_hpc.node.meminfo import read_meminfo
from gemini_hpc.node.memory_cgroup import AGENT_ROOM_BYTES, Choice
from gemini_hpc.node.unprotected import ELSEWHERE, UnprotectedNote

EXIT_STRICT = 3
POLL_S = 0.005  # pause between two attempts to connect to a starting agent
AWAKE_S = 1.5  # an agent of an earlier incarnation that has not answered by then hangs
EXITED_GRACE_S = 0.5  # the agent's process may have left a daemon of its own behind
ANSWER_GRACE_S = 0.5  # the agent's timeout begins with the request, after its start
OWNER_GRACE_S = 1.5  # for the owner's child to end after attach_timeout_s
NAMED = 8
INSTALLED_S = 5.0  # time limit to import the agent's program
FORMER_END_S = 0.5  # time limit to end a former agent; the job waits
MOVES_S = 1.5  # time for an agent to move into its job's new directory
WAIT_POLL_S = 0.05  # pause between two attempts while a living agent moves
REPLICAS_MAX = 32
TIER_INTERVAL_MAX_S = HANG_MAX_S = 604800  # a week: a larger number is a mistake in its unit
AUTO = "auto"  # as an interval of the tier; `core.tier_interval` has the same value, but root does not import it
SPARES_MAX = 1024

# Exit statuses by which the child that is the job's owner reports its outcome to root.
_PROTECTED, _UNPROTECTED, _NOT_STARTED = 0, 10, 11
_NO_ROOM = b"no room: "  # prefix of root's answer if it starts no agent for lack of memory
# Root's answers to the child that asks for an agent.
_STARTED, _BEREFT, _WAIT = b"started", b"bereft", b"wait"


@dataclass(frozen=True, slots=True)
class JobRun:
    """A single run of a job, as slurmd describes it.

    Attributes:
        job: The job's id.
        uid: The uid of the job's owner.
        restart: Restart count.
        replicas: Copies of each shard; with parity, nodes of a group.
        node: This node's name.
        nodelist: The job's nodes as a Slurm host list.
        tier: Directory of the tier; "" if not given.
        tier_interval: Seconds between two saves to the tier, or "auto"; 0 if not given.
        hang_s: Seconds for which one rank may keep the others waiting before the step restarts; 0: off; None: not
            given.
        spares: Number of spare nodes.
        after: The job whose training this job continues; 0: none.
        parity: Parity blocks in a row of a group of `replicas` nodes; 0: whole copies.
        key: Random key of the submission; "" if there is none.
        cluster: Slurm's cluster name; "" for a name that is not fit for a file name.
        cpus: CPUs of the job's nodes as Slurm lists them; "" if not known.
        gpus: GPUs of this node as Slurm lists them; "" if not known.
        slurm_conf: Path of slurm.conf; "" if not known.
    """

    job: int
    uid: int
    restart: int
    replicas: int
    node: str
    nodelist: str
    tier: str
    tier_interval: int | str
    hang_s: int | None = None
    spares: int = 0
    after: int = 0
    parity: int = 0
    key: str = ""
    cluster: str = ""
    cpus: str = ""
    gpus: str = ""
    slurm_conf: str = ""


# Names of the command line's arguments in the order of the prolog's script. All but the first six may be empty.
_ALWAYS = ("job", "uid", "restart", "replicas", "node", "nodelist")
_MORE = ("tier", "tier_interval", "hang", "spares", "after", "redundancy", "key", "cluster")
ARGUMENTS = (*_ALWAYS, *_MORE, "cpus", "gpus", "slurm_conf")


def parse_arguments(argv: list[str]) -> JobRun:
    """Return the incarnation that the command line describes.

    Raises:
        ValueError: An argument is not valid; the message names the wanted and the found value.
    """
    if len(argv) != len(ARGUMENTS):
        raise ValueError(f"wanted {len(ARGUMENTS)} arguments, found {len(argv)}")
    given = dict(zip(ARGUMENTS, argv, strict=True))
    replicas, spares, after = given["replicas"], given["spares"], given["after"]
    return JobRun(
        job=parse_number("job id", given["job"], 1, 2**32 - 1),
        uid=parse_number("uid", given["uid"], 0, 2**32 - 2),
        restart=parse_number("restart count", given["restart"], 0, 2**32 - 1),
        replicas=parse_number("replicas", replicas, 1, REPLICAS_MAX),
        node=_parse_text("node name", given["node"], r"[A-Za-z0-9._-]{1,255}"),
        nodelist=_parse_text("node list", given["nodelist"], r"[A-Za-z0-9._,\[\]-]{1,60000}"),
        tier=_parse_text("tier", given["tier"], r"|/[ -~]{0,4095}", banned="\"'`\\"),
        tier_interval=_parse_interval(given["tier_interval"]),
        hang_s=_parse_hang_s(given["hang"]),
        spares=parse_number("spares", spares, 0, SPARES_MAX) if spares else 0,
        after=parse_number("job to go on after", after, 1, 2**32 - 1) if after else 0,
        parity=_parse_parity(given["redundancy"], replicas),
        key=_parse_text("job key", given["key"], r"|[0-9a-f]{16}"),
        cluster=_keep_valid(given["cluster"], r"[A-Za-z0-9_.-]{1,64}"),
        cpus=_keep_valid(given["cpus"], r"[0-9x(),]{1,60000}"),
        gpus=_keep_valid(given["gpus"], r"[A-Za-z0-9_.,:/-]{1,4096}"),
        slurm_conf=_keep_valid(given["slurm_conf"], r"/[ -~]{1,4095}"),
    )


def _parse_parity(redundancy: str, replicas: str) -> int:
    """Return the number of parity blocks in the plugin's text.

    The text is "", "xor", or "rs:K+M" over groups of K + M = replicas nodes.
    """
    text = _parse_text("redundancy", redundancy, r"|xor|rs:[1-9][0-9]?\+[1-4]")
    if not text.startswith("rs:"):
        return int(text == "xor")
    data, parity = map(int, text[3:].split("+"))
    if data + parity != int(replicas):
        raise ValueError(f"redundancy: {text!r} is not for groups of {replicas} nodes")
    return parity


def parse_number(name: str, text: str, least: int, most: int) -> int:
    """Return a strict decimal number within bounds.

    Raises:
        ValueError: The text is not a number from `least` to `most`.
    """
    if re.fullmatch(r"0|[1-9][0-9]{0,9}", text) and least <= int(text) <= most:
        return int(text)
    raise ValueError(f"{name}: wanted a whole number from {least} to {most}, found {text[:80]!r}")


def _parse_interval(text: str) -> int | str:
    if text in ("", AUTO):
        return AUTO if text else 0
    return parse_number("tier interval", text, 1, TIER_INTERVAL_MAX_S)


def _parse_hang_s(text: str) -> int | None:
    if text in ("", "off"):
        return 0 if text else None
    return parse_number("hang", text, 1, HANG_MAX_S)


def _parse_text(name: str, text: str, pattern: str, banned: str = "") -> str:
    if re.fullmatch(pattern, text) and not any(c in text for c in banned):
        return text
    raise ValueError(f"{name}: found {text[:80]!r}, which is not valid")


def _keep_valid(text: str, pattern: str) -> str:
    """Return slurmd's text if it is valid, else "": the job is then protected without it."""
    return text if re.fullmatch(pattern, text) else ""


_notes: list[UnprotectedNote] = []  # the note of this process's incarnation


def _report_unprotected(job: int, why: str) -> None:
    log_fault("prolog", job, f"not protected: {why}")
    _note_reason(why)


def _note_reason(why: str) -> None:
    for note in _notes:
        note.write_reason(why)


def main(argv: list[str]) -> int:
    """Do the prolog's work and return the exit status. Never raise."""
    try:
        inc = parse_arguments(argv)
    except ValueError as exc:
        _report_unprotected(0, f"{exc}")
        return 0
    try:
        settings = load_site_settings()
    except ConfigError as exc:
        _notes.append(UnprotectedNote(Settings().run_dir, inc.job, inc.restart))
        _report_unprotected(inc.job, f"{exc}")
        _notes[-1].publish()
        return 0
    _notes.append(UnprotectedNote(settings.run_dir, inc.job, inc.restart))
    try:
        outcome = _protect_job(inc, settings)
    except (job_directory.JobDirError, privileges.PrivilegeError, OSError) as exc:
        _report_unprotected(inc.job, f"{exc}")
        outcome = _UNPROTECTED if _is_exhaustion(exc) else _NOT_STARTED
    except Exception as exc:  # a prolog that fails drains its node: never for a fault of ours
        _report_unprotected(inc.job, f"internal error of gemini-hpc ({type(exc).__name__}: {exc})")
        outcome = _NOT_STARTED
    _notes[-1].publish()
    return EXIT_STRICT if settings.strict_prolog and outcome == _NOT_STARTED else 0


def _protect_job(inc: JobRun, settings: Settings) -> int:
    owner = privileges.find_owner(inc.uid)
    run_fd = job_directory.open_run_dir(settings.run_dir, create=True)
    # Remove leftovers before making anything: they may be the reason for a full file system.
    for problem in stale_jobs.remove(run_fd, settings.run_dir, except_job=inc.job):
        log_fault("prolog", inc.job, problem)
    # Enter the job before its directory is made or found: otherwise another prolog's sweep could remove it as a
    # leftover.
    former = _record_start(settings.run_dir, inc)
    try:
        if former is not None and job_directory.has_directory(run_fd, inc.job, inc.uid):
            former = None
        shared = job_directory.make(run_fd, inc.job, inc.uid, owner.pw_gid)
    except job_directory.JobDirError as exc:  # a user's file is in the way, or users have filled the file system
        _report_unprotected(inc.job, f"{exc}")
        return _UNPROTECTED
    if shared:
        log_fault(
            "prolog", inc.job, f"the job's directory has no file system of its own ({shared}): users can fill it"
        )
    if inc.restart and (problem := step_leftovers.remove(inc.slurm_conf, inc.node, inc.job, inc.uid)):
        log_fault("prolog", inc.job, f"steps with --mpi=pmix may fail on this node: {problem}")
    oom.raise_score()
    granted = _compute_share(inc, settings)
    _resize_cgroup(inc, settings.run_dir, granted)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = clock.monotonic() + settings.attach_timeout_s + OWNER_GRACE_S
    keep = [theirs.fileno(), *(fd for note in _notes for fd in note.fds)]
    child = privileges.fork_as(
        owner,
        lambda: _attach_as_owner(inc, settings, theirs),
        _NOT_STARTED,
        partial(_report_unprotected, inc.job),
        keep,
    )
    theirs.close()
    _start_if_asked(inc, settings, granted, ours, deadline, former)
    outcome = privileges.wait_for_child(child, deadline - clock.monotonic())
    reaper.ensure_reaper(settings, "prolog", inc.job)
    if outcome == _NOT_STARTED and settings.strict_prolog and _can_run_agent():
        return _UNPROTECTED
    return outcome


def _record_start(run_dir: str, inc: JobRun) -> ledger.LedgerEntry | None:
    """Enter the incarnation in the ledger. Return the former entry if its agent has not released its memory."""
    try:
        with ledger.open_ledger(run_dir) as entries:
            known = entries.get(inc.job)
            # Slurm has reused the job id; the former agent belongs to another user
            if known is not None and known.uid != inc.uid:
                _end_former(inc, known.group)
                known = None
            entries.record_start(inc.job, inc.uid, inc.restart)
            return None if known is None or known.released else known
    except OSError as exc:
        log_fault(
            "prolog", inc.job, f"could not record the agent, so nothing ends it if it hangs: {exc.strerror or exc}"
        )
        return None


def _end_former(inc: JobRun, group: cgroup.AgentCgroup) -> None:
    try:
        cgroup.end(group, FORMER_END_S)
    except OSError as exc:
        log_fault("prolog", inc.job, f"could not end an earlier agent: {exc.strerror or exc}")


def _compute_share(inc: JobRun, settings: Settings) -> tuple[int, str]:
    """Return the job's share of the cap, in bytes and in words. It equals the job's share of the node."""
    part = node_share.WHOLE
    try:
        part = share.compute_share(inc.slurm_conf, inc.node, inc.nodelist, inc.cpus, inc.gpus)
    except OSError as exc:
        log_fault(
            "prolog",
            inc.job,
            f"its share of the node is not known, so its agent may use all: {inc.slurm_conf}: {exc.strerror}",
        )
    return int(part.part * cgroup.compute_cap_bytes(settings, read_meminfo()["MemTotal"])), part.words


def _resize_cgroup(inc: JobRun, run_dir: str, granted: tuple[int, str]) -> None:
    """Set the limit of an earlier incarnation's agent to the new share, which may be larger or smaller."""
    try:
        with ledger.open_ledger(run_dir) as entries:
            known = entries.get(inc.job)
    except OSError:
        return  # `_record_start` has reported the error
    if known is not None and (problem := cgroup.resize(known.group, granted[0] + AGENT_ROOM_BYTES)):
        log_fault("prolog", inc.job, problem)


def _start_if_asked(
    inc: JobRun,
    settings: Settings,
    granted: tuple[int, str],
    sock: socket.socket,
    deadline: float,
    former: ledger.LedgerEntry | None,
) -> None:
    """Start an agent if the owner's child asks for one. Root starts at most one, and only if there is room.

    `former` is the entry of an agent whose directory was unmounted or removed. While that agent lives, root waits
    for it: it moves into the new directory by itself. An agent that does not move is ended, so that there are never
    two.
    """
    until = clock.monotonic() + MOVES_S
    with sock:
        sock.settimeout(max(0.01, deadline - clock.monotonic()))
        with contextlib.suppress(OSError):
            while sock.recv(1):
                pids = reaper.list_agent_pids(former) if former is not None else []
                if pids and clock.monotonic() < until:
                    sock.send(_WAIT)
                    continue
                _start_agent(inc, settings, granted, sock, former)
                return


def _start_agent(
    inc: JobRun,
    settings: Settings,
    granted: tuple[int, str],
    sock: socket.socket,
    former: ledger.LedgerEntry | None,
) -> None:
    if former is not None:
        reaper.kill_pids(former, reaper.list_agent_pids(former))
        _end_former(inc, former.group)
        log_fault("prolog", inc.job, "the job's directory is gone, and what an earlier agent of it held here is lost")
    choice = _prepare_cgroup(inc, settings)
    if problem := cgroup.find_shortage(choice, settings):
        sock.send(_NO_ROOM + problem.encode())
        return
    try:
        keys = _pack_keys(inc, settings)
        limit_bytes = granted[0] + AGENT_ROOM_BYTES
        first = partial(_leave_slurmds_cgroup, inc, settings.run_dir, choice, limit_bytes)
        process = spawn.start_agent(f"{settings.run_dir}/{inc.job}", inc.job, inc.uid, inc.node, granted, first, keys)
    except spawn.LaunchError as exc:
        sock.send(f"{exc}".encode())
        return
    socket.send_fds(sock, [_STARTED if former is None else _BEREFT], [process])
    os.close(process)


def _pack_keys(inc: JobRun, settings: Settings) -> bytes:
    """Return the keys of the job, and of the job that it continues, for the agent; b"" if the site has MUNGE."""
    if settings.auth != "key":
        return b""
    from gemini_hpc.wire import keyed, site_key

    try:
        return site_key.pack(settings, inc.uid, dict.fromkeys((inc.job, inc.after or inc.job)))
    except keyed.KeyFileError as exc:
        raise spawn.LaunchError(f"{exc}") from None


def _prepare_cgroup(inc: JobRun, settings: Settings) -> Choice:
    try:
        return reaper.prepare_cgroup(settings)
    except (OSError, ValueError, KeyError) as exc:
        return Choice("stay", why=f"{exc}")


def _can_run_agent() -> bool:
    """Return whether an agent could run here.

    If so, a user prevents it (by processes, ports or signals), and no user may have a node drained (requirement
    users-errors).
    """
    import subprocess

    argv = [sys.executable, "-I", "-c", "import gemini_hpc.agent.daemon"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=INSTALLED_S, check=False, env=spawn.ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return False
    except OSError as exc:
        return _is_exhaustion(exc)
    return done.returncode == 0


def _is_exhaustion(exc: Exception) -> bool:
    """Return whether processes or memory are exhausted. Users exhaust them; the site is not at fault."""
    return isinstance(exc, OSError) and exc.errno in (errno.EAGAIN, errno.ENOMEM)


def _leave_slurmds_cgroup(inc: JobRun, run_dir: str, choice: Choice, limit_bytes: int, agent: int) -> None:
    """Move the process that becomes the agent out of slurmd's cgroup.

    In the new cgroup, full memory harms no slurmd, and root can end the agent with all its children.
    """
    try:
        group, problem = cgroup.admit(choice, inc.job, agent, limit_bytes)
        with ledger.open_ledger(run_dir) as entries:
            known = entries.get(inc.job)
            if known is not None and not set(known.group.directories) <= set(group.directories):
                # The former agent no longer answers. Its scope would be lost from the ledger.
                _end_former(inc, known.group)
            entries.put(
                ledger.LedgerEntry(inc.job, inc.uid, inc.restart, group, started_s=ledger.read_boot_clock_s())
            )
            others = [entry.group for entry in entries if entry.job != inc.job]
        oom.lower_scores(others)
    except (OSError, ValueError, KeyError) as exc:
        problem = f"{exc}"
    if problem:
        log_fault("prolog", inc.job, f"the agent stays in slurmd's cgroup, and counts against its limits: {problem}")


def _attach_as_owner(inc: JobRun, settings: Settings, root: socket.socket) -> int:
    """Do the part that root must not do, as the job's owner. Return the exit status.

    `_UNPROTECTED` means that an agent is there, but refused or did not answer. The user may have caused that, so it
    is never an error of the node. The other results are `_PROTECTED` and `_NOT_STARTED`.
    """
    directory = f"{settings.run_dir}/{inc.job}"
    try:
        answer = _attach(directory, inc, clock.monotonic() + settings.attach_timeout_s, root)
        if answer != "ready":
            raise ask_agent.ListenerError(f"the agent answers {answer[:80]!r}, wanted 'ready'")
    except ask_agent.ListenerError as exc:
        _report_unprotected(inc.job, f"{exc}")
        return _UNPROTECTED
    except spawn.NoRoomError as exc:
        _report_unprotected(inc.job, f"{exc}")
        return _UNPROTECTED
    except spawn.LaunchError as exc:
        _report_unprotected(inc.job, f"the agent could not be started: {exc}; see {directory}/agent.log")
        return _NOT_STARTED
    return _PROTECTED


def _ask_root_to_start(root: socket.socket, deadline: float) -> tuple[int | None, bool]:
    """Ask root for an agent.

    Returns:
        A pidfd of the new agent, or None if the caller must wait for a living one. Second, whether an earlier agent
            is gone together with its directory.

    Raises:
        LaunchError: Root has started no agent.
    """
    try:
        root.settimeout(max(0.01, deadline - clock.monotonic()))
        root.send(b"!")
        answer, got, _, _ = socket.recv_fds(root, 512, 1)
    except OSError as exc:
        raise spawn.LaunchError(f"the prolog could not start its process: {exc.strerror or exc}") from None
    if answer == _WAIT:
        return None, False
    if answer.startswith(_NO_ROOM):
        raise spawn.NoRoomError(answer.removeprefix(_NO_ROOM).decode(errors="replace"))
    if not got:
        raise spawn.LaunchError(answer.decode(errors="replace") or "the prolog could not start its process")
    return got[0], answer == _BEREFT


def _attach(directory: str, inc: JobRun, deadline: float, root: socket.socket) -> str:
    """Find the agent, or have it started once, and announce this incarnation. Return the agent's answer."""
    question: dict[str, object] = {
        "op": "attach",
        "job": inc.job,
        "restart": inc.restart,
        "nodelist": inc.nodelist,
        "node": inc.node,
        "replicas": inc.replicas,
        "tier": inc.tier,
        "tier_interval": inc.tier_interval,
        "hang": inc.hang_s,
        "spares": inc.spares,
        "after": inc.after,
        "parity": inc.parity,
        "key": inc.key,
        "cluster": inc.cluster,
    }
    process: int | None = None
    ended = heard = False
    while True:
        try:
            with ask_agent.connect(directory, inc.uid, deadline) as sock:
                if process is None:
                    _ensure_awake(sock, f"{directory}/{ask_agent.SOCKET_NAME}")
                heard = True
                answer = ask_agent.ask(sock, question, deadline + ANSWER_GRACE_S)
                # no complaint: this node is in order, and its administrator need not act
                if answer.get("state") == "unmapped":
                    remedy = _describe_remedy(inc.job, answer.get("sealed"))
                    _note_reason(ELSEWHERE + _describe_disagreement(answer.get("absent")) + remedy)
                return str(answer["op"])
        except ask_agent.NobodyAnswersError:
            if process is None:
                _clear_way(f"{directory}/{ask_agent.SOCKET_NAME}")
                process, bereft = _ask_root_to_start(root, deadline)
                if process is None:
                    clock.sleep(WAIT_POLL_S)
                    continue
                if bereft:
                    question["bereft"] = True
            elif not ended and select.select([process], [], [], 0)[0]:
                ended = True
                deadline = min(deadline, clock.monotonic() + EXITED_GRACE_S)
            if clock.monotonic() + POLL_S > deadline:
                why = "it ended at once" if ended else "it did not open its socket in time"
                if heard:  # the agent could be started; if its owner's processes end it, the node is not at fault
                    raise ask_agent.ListenerError(f"the agent is gone: {why}") from None
                raise spawn.LaunchError(why) from None
            clock.sleep(POLL_S)


def _describe_disagreement(absent: object) -> str:
    """Return why the agents do not agree, with the nodes on which no agent answers."""
    names = absent if isinstance(absent, list) else []
    names = [name for name in names if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)]
    if not names:
        return "the agents of the job's nodes did not agree in time"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"no agent answers on {', '.join(names[:NAMED])}{more}"


def _describe_remedy(job: int, sealed: object) -> str:
    """Return what the user can do for the sealed version that agents hold; "" if there is none."""
    if not isinstance(sealed, int) or not 0 < sealed < 1 << 63:
        return ""
    return f"; scontrol requeue {job} lets the job resume from step {sealed}"


def _ensure_awake(sock: socket.socket, path: str) -> None:
    """Kill an agent of an earlier incarnation that no longer answers.

    A node that comes back empty can be served by its peers. A node whose agent hangs would keep the whole job from
    agreeing.

    Raises:
        NobodyAnswersError: The hung agent was killed.
    """
    try:
        ask_agent.ask(sock, {"op": "verdict?"}, clock.monotonic() + AWAKE_S)
    except ask_agent.ListenerError:
        pid = ask_agent.read_peer_pid(sock)
        with contextlib.suppress(OSError):
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
            # the process is in a pid namespace that is not visible here; kill(0) would hit the caller's own group
            else:
                os.unlink(path)
        raise ask_agent.NobodyAnswersError("a hung agent was killed") from None


def _clear_way(path: str) -> None:
    """Remove a file, link or pipe in the socket's place, so that the agent can bind.

    A dead agent's socket is left to the new agent: its supervisor may be restarting it at this moment.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except OSError:
        pass


if __name__ == "__main__":
    status = main(sys.argv[1:])
    lines.flush_streams()
    os._exit(status)  # the job waits; skip the interpreter's teardown
