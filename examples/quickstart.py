"""A rank is killed and the training resumes, on one machine: no Slurm, no root, no MUNGE, less than a minute.

    pip install '.[torch]' && python examples/quickstart.py          # in a checkout, on Linux

Two ranks train examples/train_small.py twice: undisturbed, and beside an agent, which holds their states in memory.
On a cluster Slurm's prolog starts the agent. Here this program starts it, and kills rank 1 in mid-training. At the
end both runs must have the same weights, bit for bit.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from gemini_hpc.client.agent_connection import AgentLost, ask_once, ask_verdict
from gemini_hpc.wire import local

TRAINING = Path(__file__).with_name("train_small.py")
NODE, RANKS, KILLED_AT = "laptop", 2, 80
WAIT_S = 240.0  # a bound for machines so busy that the import of torch takes minutes
RELEASED_S = 10.0  # an agent frees its memory at once if the training has succeeded
JOB = os.getpid()
BEGAN = time.monotonic()


def tell(text: str) -> None:
    """Print a line of the timeline."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def start_agent(directory: Path) -> subprocess.Popen[bytes]:
    """Start an agent for a job of this node, and begin the job, as the prolog does on a cluster."""
    argv = [sys.executable, "-m", "gemini_hpc.agent", "--job", str(JOB), "--uid", str(os.getuid())]
    with (directory / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [*argv, "--node", NODE, "--dir", str(directory)], stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            answer = ask_once(str(directory / "agent.sock"), local.Attach(JOB, 0, NODE, NODE, replicas=1), WAIT_S)
            break
        except AgentLost:
            if agent.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the agent does not start:\n{(directory / 'agent.log').read_text()}")
            time.sleep(0.05)
    if answer != local.Ready("mapped"):
        os.killpg(agent.pid, signal.SIGKILL)
        sys.exit(f"the agent refuses: {answer}")
    return agent


def start_ranks(directory: Path, agent_socket: str = "") -> list[subprocess.Popen[str]]:
    """Start the ranks of a training, under the launcher if there is an agent, as a job script does with srun."""
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {key: value for key, value in os.environ.items() if not key.startswith(("GEMINI_", "SLURM_"))}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(RANKS)}
    if agent_socket:
        common |= {"GEMINI_SOCKET": agent_socket, "GEMINI_STEP": f"{JOB}.0"}
    argv = [sys.executable, *(["-m", "gemini_hpc.launch"] if agent_socket else []), str(TRAINING)]
    ranks = []
    for rank in range(RANKS):
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (directory / f"rank{rank}.log").open("w") as log:
            out = subprocess.PIPE if agent_socket else log
            ranks.append(
                subprocess.Popen(argv, env=env, cwd=directory, stdout=out, stderr=subprocess.STDOUT, text=True)
            )
        if agent_socket:
            threading.Thread(target=show_lines, args=(ranks[-1],), daemon=True).start()
    return ranks


def show_lines(rank: subprocess.Popen[str]) -> None:
    """Show what a rank prints; what torch says about a lost peer is left out."""
    assert rank.stdout is not None
    for line in rank.stdout:
        if line.startswith(("gemini-hpc: ", "epoch ")):
            tell(line.rstrip())


def kill_rank(launcher: subprocess.Popen[str], agent_socket: str) -> None:
    """Kill the rank of a launcher in mid-training, as the kernel does if the memory is not enough."""
    deadline = time.monotonic() + WAIT_S
    while (verdict := ask_verdict(agent_socket)) is None or verdict.sealed[1] < KILLED_AT:
        if launcher.poll() is not None or time.monotonic() > deadline:
            sys.exit("the training does not come to its step")
        time.sleep(0.005)
    newest = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[-1]
    os.kill(int(newest), signal.SIGKILL)
    tell(f">>> rank 1 killed by SIGKILL after step {KILLED_AT}")


def main() -> None:
    """Run both trainings and compare their weights."""
    if lacking := [name for name in ("torch", "numpy") if find_spec(name) is None]:
        sys.exit(
            f"{sys.executable} has no {' and no '.join(lacking)}, which this training needs: pip install '.[torch]'"
        )
    with tempfile.TemporaryDirectory(prefix="gemini-") as name:
        here = Path(name)
        agent_directory, agent_socket = here / "agent", str(here / "agent" / "agent.sock")
        agent_directory.mkdir(0o700)
        agent = start_agent(agent_directory)
        tell("the agent of this machine runs")
        ranks: list[subprocess.Popen[str]] = []
        try:
            ranks += start_ranks(here / "killed", agent_socket)
            tell("two ranks begin to train; the import of torch takes seconds")
            ranks += start_ranks(here / "undisturbed")
            kill_rank(ranks[1], agent_socket)
            for rank in ranks:
                if rank.wait(WAIT_S) != 0:
                    sys.exit("a rank has failed")
            undisturbed, resumed = ((here / run / "spirals.pt").read_bytes() for run in ("undisturbed", "killed"))
            if undisturbed != resumed:
                sys.exit("the weights differ from those of the undisturbed run")
            tell("same weights as an undisturbed run, bit for bit")
        finally:
            with suppress(AgentLost):  # the epilog's word: the job has ended, free its memory
                ask_once(agent_socket, local.Epilog(JOB, 0, exit_code="0"), WAIT_S)
            for rank in ranks:
                rank.kill()
                rank.wait(WAIT_S)
            try:
                agent.wait(RELEASED_S)
            except subprocess.TimeoutExpired:  # it waits for a requeue of a training that has failed
                os.killpg(agent.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
