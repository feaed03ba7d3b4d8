"""A job's directory that root makes again before a step, where somebody has unmounted it."""

from __future__ import annotations

import pytest

from .conftest import ALICE, BOB, Node
from .expect import silent

pytestmark = pytest.mark.slow

PYTHON = "/opt/gemini-hpc/venv/bin/python3"
JOB = "/run/gemini-hpc/7"


def again(node: Node, *words: str) -> tuple[int, str]:
    """Exit status, and what is said."""
    done = node.run([PYTHON, "-I", "-m", "gemini_hpc.node.again", *words], PATH="/usr/bin:/bin", LC_ALL="C.UTF-8")
    return done.returncode, done.stderr


@pytest.mark.parametrize("unmount", [f"umount -l {JOB}", "umount -l /run/gemini-hpc"])
def test_the_agent_moves_in(node: Node, unmount: str) -> None:
    node.mode("moves")
    assert silent(node.prolog())
    before = node.agents()
    node.sh(unmount)
    status, said = again(node, "7", str(ALICE))
    assert status == 0 and said.count("\n") == 1 and "made another one" in said
    assert node.sh(f"stat -c '%u %a' {JOB}; grep -c ' {JOB} ' /proc/self/mountinfo") == f"{ALICE} 700\n1\n"
    node.sh(f"for n in $(seq 100); do [ -S {JOB}/agent.sock ] && exit 0; sleep 0.05; done; exit 1")
    assert node.agents() == before and silent(node.epilog())


def test_nothing_is_made_for_anybody_else(node: Node) -> None:
    """Nor where no agent is left that could move in."""
    assert silent(node.prolog())
    node.sh(f"umount -l {JOB}")
    below = node.sh(f"stat -c '%u %a %i' {JOB}")
    for words in (("7", str(BOB)), ("8", str(ALICE))):
        assert again(node, *words) == (1, "")
    for line in ("", "7", f"7 {ALICE} x", f"../7 {ALICE}", "7 -1", "7 $(id)"):
        status, said = again(node, *line.split())
        assert status == 1 and "could not be made again" in said and said.count("\n") == 1, line
    node.sh(f"kill -9 {node.agents()[0]}")
    node.sh("for n in $(seq 100); do pgrep -f '[g]emini_hpc.agent --job' >&2 || exit 0; sleep 0.05; done; exit 1")
    assert again(node, "7", str(ALICE)) == (1, "")
    assert node.sh(f"stat -c '%u %a %i' {JOB}") == below


def test_two_steps_at_once_make_one(node: Node) -> None:
    node.mode("moves")
    assert silent(node.prolog())
    node.sh(f"umount -l {JOB}")
    both = f"{PYTHON} -I -m gemini_hpc.node.again 7 {ALICE}"
    node.sh(f"{both} & one=$!; {both} & two=$!; wait $one; wait $two")
    assert node.sh(f"grep -c ' {JOB} ' /proc/self/mountinfo") == "1\n"
