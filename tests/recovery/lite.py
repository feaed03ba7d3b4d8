"""A training program without torch: the same requests to the agents, a state that betrays every mixture.

    srun python lite.py LOG STEPS STEP_SECONDS [SHARD_BYTES]

STEPS 0: until the file LOG.end names the last step, which no rank has reached yet then.

One rank a node. The state of rank r after version v is a chain of hashes over (rank, epoch, version), so it names
its whole lineage; each rank also computes the state of the ranks whose copies its node holds, which stands for
the transport between trainers. After a recovery every rank fetches *all* shards and checks that they are of one
version and one lineage. Each line of LOG is a JSON object: what, rank, version, epoch, restart, t, ...

Where LITE_SIGNALS is set, SIGUSR1 is noted in LOG. SIGUSR2 has a rank take more memory than its job has.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import socket
import sys
import time

import msgspec

from gemini_hpc.client import joining
from gemini_hpc.core.digest import digest_bytes as digest_of
from gemini_hpc.wire import local, version
from gemini_hpc.wire.control_page import ControlPage
from gemini_hpc.wire.traffic import Operation, TimelineState, TrafficState

SET = os.environ.get("LITE_SET", "default")
FAILS = int(os.environ.get("LITE_FAILS", "0"))  # the step at which all ranks have a mistake; 0: none
TAKES = int(os.environ.get("LITE_TAKES", "0"))  # the step at which rank 1 takes more memory than its job has; 0: none
TAKES_MIB = 1000  # far more than the job of a test asks for, and no harm to a machine that does not hold it to that
LEAST = version.OLDEST
MOST = int(os.environ.get("LITE_PROTOCOL", version.CURRENT))


class Agent:
    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(120)
        self.sock.connect(path)

    def ask(self, request: local.Message, fds: list[int] | None = None) -> tuple[local.Message, list[int]]:
        if fds:
            socket.send_fds(self.sock, [local.encode(request)], fds)
        else:
            self.sock.send(local.encode(request))
        data, got, _, _ = socket.recv_fds(self.sock, local.MAX_PACKET_BYTES, 4)
        if not data:
            raise ConnectionError("the agent has gone")
        return local.reply_decoder.decode(data), list(got)


def greet(path: str, hello: local.Hello, patience_s: float = 10.0) -> tuple[Agent, local.Message, list[int]]:
    """As `client.agent_connection` does: an agent that is dead, or dies over it, is asked again: another is being
    started."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            agent = Agent(path)
            return agent, *agent.ask(hello)
        except (ConnectionError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def link(state: str, rank: int, epoch: int, version: int) -> str:
    return hashlib.blake2b(f"{state} {rank} {epoch} {version}".encode(), digest_size=16).hexdigest()


class Slots:
    def __init__(self, agent: Agent, rank: int, world: int, home: int, size: int) -> None:
        self.rank, self.world, self.home, self.size = rank, world, home, size
        self.fds: list[int] = []
        self.maps: list[mmap.mmap] = []
        self.stamps: list[tuple[int, int, int, str]] = [(0, 0, 0, "")] * 2
        reply, self.fds = agent.ask(local.Register(SET, rank, world, home, size))
        if not isinstance(reply, local.Slots):
            raise SystemExit(f"lite: {reply}")
        self.maps = [mmap.mmap(fd, size) for fd in self.fds]

    def save(self, agent: Agent, epoch: int, version: int, payload: bytes) -> str:
        reply, _ = agent.ask(local.BeginVersion(SET, self.rank, version))
        if not isinstance(reply, local.Begun):
            return str(reply)
        view = self.maps[reply.slot]
        view[: len(payload)] = payload
        digest = digest_of(payload)
        landed, _ = agent.ask(local.Landed(SET, self.rank, version, reply.slot, len(payload), digest))
        self.stamps[reply.slot] = (epoch, version, len(payload), digest)
        return "" if isinstance(landed, local.Ok) else str(landed)

    def hand_back(self, agent: Agent) -> None:
        for index, fd in enumerate(self.fds):
            epoch, version, used, digest = self.stamps[index]
            back = local.HandBack(
                SET, self.rank, self.world, self.home, self.size, index, epoch, version, used, digest
            )
            agent.ask(back, [fd])


def tell(agent: Agent, rank: int) -> None:
    """What a trainer with torch tells of its traffic."""
    state = TrafficState(time.time(), "gemini", "gloo", "steady", overhead=0.01 * (rank + 1))
    timeline = TimelineState(7, 1.0, 0.9, (Operation("all_reduce", 0.1, 0.4, 1 << 20),))
    for message in (local.Traffic(SET, rank, state), local.Timeline(SET, rank, timeline)):
        reply, _ = agent.ask(message)
        if not isinstance(reply, local.Ok):
            raise SystemExit(f"lite: {reply}")


def take_memory() -> None:
    taken = [bytearray(b"x" * (1 << 20)) for _ in range(TAKES_MIB)]
    raise SystemExit(f"lite: nobody minds {len(taken)} MiB")


def last_step(path: str) -> int:
    """What the test has said; without a word of it the training goes on."""
    try:
        with open(path) as f:
            return int(f.read())
    except FileNotFoundError:
        return sys.maxsize


def main() -> int:
    log_path, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    size = int(sys.argv[4]) if len(sys.argv) > 4 else 1 << 16
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    step_id = os.environ.get("GEMINI_STEP") or f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def say(what: str, version: int, **more: object) -> None:
        line = {"what": what, "rank": rank, "version": version, "restart": restart, "step": step_id}
        os.write(log, (json.dumps({**line, "t": time.time(), **more}) + "\n").encode())

    path = os.environ["GEMINI_SOCKET"]
    hello = local.Hello(
        LEAST, MOST, SET, rank, world, 0, step_id, os.getpid(), series=joining.derive_series(os.environ)
    )
    agent, welcome, fds = greet(path, hello)
    if not isinstance(welcome, local.Welcome):
        print(f"lite: rank {rank}: {welcome}", file=sys.stderr)
        return 3
    page = ControlPage(fds[0], writable=False)
    tell(agent, rank)
    version = welcome.chosen_version
    states = dict.fromkeys(range(world), "")
    lineage: list[int] = []
    if version:
        for r in range(welcome.chosen_world):
            copy, got = agent.ask(local.Fetch(SET, r))
            if not isinstance(copy, local.Copy):
                print(f"lite: rank {rank}: shard {r}: {copy}", file=sys.stderr)
                return 4
            head = json.loads(os.pread(got[0], copy.used, 0).rstrip(b"\0"))
            os.close(got[0])
            if head["version"] != version or (lineage and head["lineage"] != lineage):
                say("MIXED", version, found=head)
                return 5
            lineage, states[r] = head["lineage"], head["state"]
    for line in welcome.lost:
        say("lost", version, reason=line)
    if welcome.notice:
        say("notice", version, text=welcome.notice)
    if "LITE_SIGNALS" in os.environ:
        signal.signal(signal.SIGUSR1, lambda *_: say("USR1", version))
    signal.signal(signal.SIGUSR2, lambda *_: take_memory())
    me = {"node_rank": welcome.node_rank, "pid": os.getpid(), "node": socket.gethostname()}
    say("resumed", version, epoch=welcome.epoch, lineage=lineage, **me)
    expect = ""
    for v, e in enumerate(lineage, 1):
        expect = link(expect, 0, e, v)
    if expect != states[0]:
        say("MIXED", version, found="chain")
        return 5
    ring = welcome.group  # those that keep this node's shards come next, those whose shards it keeps at the end
    held = [Slots(agent, r, world, r, size) for r in (ring[0], *ring[:0:-1])[: welcome.replicas]]
    late, seen = False, (0, 0)
    chosen, patience = (welcome.chosen_epoch, version), time.monotonic() + 10
    while page.sealed < chosen and time.monotonic() < patience:
        time.sleep(0.0005)
    together = os.open(f"{log_path}.{restart}.{step_id}", os.O_RDWR | os.O_CREAT, 0o644)
    while version < (steps or last_step(f"{log_path}.end")):
        time.sleep(pause)
        if version + 1 == TAKES and rank == 1:
            take_memory()
        os.pwrite(together, (version + 1).to_bytes(8, "little"), 8 * rank)  # the collective: nobody runs ahead
        while any(int.from_bytes(os.pread(together, 8, 8 * r), "little") <= version for r in range(world)):
            time.sleep(0.001)
        if version + 1 == FAILS:
            raise ZeroDivisionError(f"at step {FAILS}")
        version += 1  # the optimizer step of the program: only now is v-1's state overwritten
        lineage.append(welcome.epoch)
        for r in states:
            states[r] = link(states[r], r, welcome.epoch, version)
        say("step", version, epoch=welcome.epoch)
        try:
            for slots in held:
                head = {"version": version, "lineage": lineage, "state": states[slots.rank], "rank": slots.rank}
                payload = json.dumps(head).encode()
                trouble = slots.save(agent, welcome.epoch, version, payload.ljust(size, b"\0")[:size])
                if trouble:
                    say("skipped", version, reason=trouble)
            waiting = not late or page.sealed != seen
            deadline, seen = time.monotonic() + (5.0 if waiting else 0.0), page.sealed
            while page.sealed < (welcome.epoch, version) and time.monotonic() < deadline:
                time.sleep(0.0005)
            late = page.sealed < (welcome.epoch, version)
            say("late" if late else "sealed", version)
            patience = time.monotonic() + 10
            while page.held >= welcome.epoch and not late and time.monotonic() < patience:  # the job leaves a node
                time.sleep(0.0005)
        except (OSError, ConnectionError):
            say("agent gone", version)
            for _ in range(100):
                try:
                    agent = Agent(path)
                    again, fds = agent.ask(msgspec.structs.replace(hello, rejoin=True))
                    if isinstance(again, local.Welcome):
                        page = ControlPage(fds[0], writable=False)
                        for slots in held:
                            slots.hand_back(agent)
                        say("rejoined", version)
                        break
                except OSError:
                    pass
                time.sleep(0.05)
    agent.ask(local.Event("done", version, time.time()))
    agent.ask(local.Finished(SET, rank))
    say("done", version, state=states[rank])
    return 0


if __name__ == "__main__":
    sys.exit(main())
