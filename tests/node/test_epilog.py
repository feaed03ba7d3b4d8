"""`prolog_epilog/epilog` as slurmd runs it, on an imagined node with a fake agent."""

from __future__ import annotations

import time

import pytest
from waiting import until

from .conftest import ALICE, BOB, Node, _package
from .expect import one_line, silent

pytestmark = pytest.mark.slow


@pytest.mark.witness("the epilog releases the copies of a job that is over")
def test_released_agent_leaves_nothing(node: Node) -> None:
    assert silent(node.prolog())
    assert silent(node.epilog())
    assert not node.exists("/run/gemini-hpc/7")
    until(lambda: node.agents() == [], 20, what="the agent has ended")  # its socket ends a moment before
    assert silent(node.epilog())


@pytest.mark.witness("the epilog leaves the copies of a job that comes back")
def test_detached_agent_keeps_its_directory(node: Node) -> None:
    node.mode("detach")
    assert silent(node.prolog())
    assert silent(node.epilog(SLURM_JOB_RESTART_COUNT="1"))
    assert silent(node.epilog(SLURM_JOB_RESTART_COUNT="1"))
    assert len(node.agents()) == 1
    attach, first, second = [r["message"] for r in node.records()]
    assert attach["op"] == "attach"
    assert first == second == {"op": "epilog", "job": 7, "restart": 1, "exit_code": "256"}


def test_no_agent(node: Node) -> None:
    assert silent(node.epilog())
    assert not node.exists("/run/gemini-hpc")
    assert silent(node.prolog())
    (agent,) = node.agents()
    node.sh(f"kill -9 {agent}")
    assert silent(node.epilog())


LIMIT_S = 5.0  # of an epilog (requirement users-errors)


def nobody_asked_s(node: Node) -> float:
    """Return how long an epilog takes here that has no agent to ask: the share of what this machine is busy with."""
    began = time.monotonic()
    assert silent(node.epilog(job=99))
    return time.monotonic() - began


SAID = {
    "silent": "did not answer in time",
    "garbage": "not JSON",
    "oversized": "longer than",
    "refuse": "refused",
}


def test_agent_that_does_not_do_its_part(node: Node) -> None:
    most_s = LIMIT_S + nobody_asked_s(node)
    for job, (mode, words) in enumerate(SAID.items(), 7):
        node.mode("ok")
        assert silent(node.prolog(job=job)), mode
        node.mode(mode)
        began = time.monotonic()
        assert words in one_line(node.epilog(job=job), case=mode), mode
        assert time.monotonic() - began < most_s, mode
        assert node.exists(f"/run/gemini-hpc/{job}"), mode


def test_owner_who_stops_the_helper_is_not_waited_for(node: Node) -> None:
    """The helper's second half is the owner's process, and the owner may send it any signal."""
    most_s = LIMIT_S + nobody_asked_s(node)
    assert silent(node.prolog())
    node.mode("silent")
    node.sh(
        """
        setsid -f sh -c '
            until pids=$(pgrep -u alice -f "[g]emini_hpc.node.epilog"); do sleep 0.01; done
            setpriv --reuid alice --regid alice --clear-groups kill -STOP $pids
            touch /run/stopped' >/dev/null 2>&1
        """
    )
    began = time.monotonic()
    assert node.epilog().returncode == 0
    assert time.monotonic() - began < most_s
    assert node.exists("/run/stopped")
    assert node.sh("pgrep -f '[g]emini_hpc.node.epilog' || :") == ""


def test_directory_of_another_owner_is_left_alone(node: Node) -> None:
    node.sh(f"mkdir -p /run/gemini-hpc/7; chown {BOB} /run/gemini-hpc/7")
    assert silent(node.epilog())
    assert node.exists("/run/gemini-hpc/7")


def test_something_else_in_the_sockets_place(node: Node) -> None:
    node.sh("touch /run/victim")
    for job, make in enumerate(("mkfifo", "touch", "mkdir", "ln -s /run/victim"), 7):
        directory = f"/run/gemini-hpc/{job}"
        node.sh(f"mkdir -p {directory}; {make} {directory}/agent.sock; chown -hR {ALICE} {directory}")
        assert silent(node.epilog(job=job)), make
        assert node.exists("/run/victim"), make


def test_hostile_exit_code(node: Node) -> None:
    for value in ("$(touch /run/pwned)", "-1", "1;touch /run/pwned", "9" * 30):
        one_line(node.epilog(SLURM_JOB_EXIT_CODE=value), case=value)


def test_epilog_never_fails_even_strict(node: Node) -> None:
    node.site("strict_prolog = true\nnonsense = 1")
    one_line(node.epilog())


def test_end_is_entered_whatever_its_owner_has_done_to_the_directory(node: Node) -> None:
    """Or the stopped agent would stay for as long as the node."""
    assert silent(node.prolog())
    (agent,) = node.agents()
    node.sh(f"kill -STOP {agent}; umount -l /run/gemini-hpc/7; rmdir /run/gemini-hpc/7")
    assert silent(node.epilog())
    assert '"ended_s": null' not in node.sh("cat /run/gemini-hpc.agents/7")
    node.sh(f"kill -KILL {agent}")


@pytest.mark.alone
@pytest.mark.parametrize(("takes", "words"), [("60", "not reserved yet"), ("0", "")])
def test_a_hold_never_keeps_the_epilog(node: Node, takes: str, words: str) -> None:
    """Five seconds for everything, also on the one survivor that holds the others."""
    most_s = LIMIT_S + nobody_asked_s(node)
    hold = _package(node.venv) / "controller" / "epilog_fallback.py"
    text = hold.read_text()
    hold.write_text(f"import time\nopen('/run/held', 'w').close()\ntime.sleep({takes})\n")
    try:
        node.mode("hold 0")
        assert silent(node.prolog())
        began = time.monotonic()
        done = node.epilog()
        took_s = time.monotonic() - began
    finally:
        hold.write_text(text)
    assert done.returncode == 0 and node.exists("/run/held") and took_s < most_s
    assert words in one_line(done) if words else silent(done)
    goes_on = node.sh("pgrep -f '[g]emini_hpc.controller.epilog_fallback' || :").split()
    assert len(goes_on) == (1 if words else 0), "it goes on, as the line says"


@pytest.mark.witness("the epilog takes 5 s at most, also where the agent is stopped")
def test_epilog_ends_with_an_agent_that_is_stopped(node: Node) -> None:
    assert silent(node.prolog())
    (agent,) = node.agents()
    node.sh(f"kill -STOP {agent}")
    most_s = LIMIT_S + nobody_asked_s(node)
    began = time.monotonic()
    done = node.epilog()
    assert done.returncode == 0 and time.monotonic() - began < most_s and "did not answer in time" in one_line(done)
    node.sh(f"kill -CONT {agent}")


CHECK = """printf '#!/bin/sh\\necho checked by $(id -u) >>/run/checks; echo Xid 79; exit 1\\n' >/etc/check
chmod %s /etc/check"""


def checks(node: Node) -> list[str]:
    return node.sh("cat /run/checks 2>/dev/null || :").splitlines()


def no_check_runs(node: Node) -> bool:
    return node.sh("pgrep -f '[g]emini_hpc.node.health_report' || :") == ""


@pytest.mark.parametrize("mode", ["doubt", "detach-doubt"])
def test_root_checks_a_node_that_the_agent_doubts(node: Node, mode: str) -> None:
    node.sh(CHECK % "755")
    node.site('health_check = "/etc/check"')
    assert silent(node.prolog())
    assert silent(node.epilog(job=8)) and no_check_runs(node) and not checks(node), "a job without an agent"
    node.mode(mode)
    assert silent(node.epilog())
    until(lambda: checks(node) == ["checked by 0"] and no_check_runs(node), 20, what="the check")


def test_a_node_that_nobody_doubts_is_not_checked(node: Node) -> None:
    node.sh(CHECK % "755")
    node.site('health_check = "/etc/check"')
    assert silent(node.prolog())
    assert silent(node.epilog())
    assert no_check_runs(node) and not checks(node)


def test_root_runs_no_check_that_others_can_write(node: Node) -> None:
    node.sh(CHECK % "757")
    node.site('health_check = "/etc/check"')
    node.mode("doubt")
    assert silent(node.prolog())
    assert silent(node.epilog())
    until(lambda: no_check_runs(node), 20, what="the helper has ended")
    assert not checks(node)


@pytest.mark.parametrize("unmount", ["umount -l /run/gemini-hpc/7", "umount -l /run/gemini-hpc"])
def test_an_agent_whose_directory_is_unmounted_hears_of_its_jobs_end(node: Node, unmount: str) -> None:
    node.mode("moves")
    assert silent(node.prolog())
    before = node.agents()
    node.sh(unmount)
    assert silent(node.epilog())
    assert node.agents() == before and [r["message"]["op"] for r in node.records()] == ["attach", "epilog"]
    assert silent(node.prolog(SLURM_JOB_RESTART_COUNT="1"))
    assert node.agents() == before


def test_an_agent_that_does_not_come_into_its_new_directory_keeps_no_epilog(node: Node) -> None:
    assert silent(node.prolog())
    node.sh("umount -l /run/gemini-hpc/7")
    began = time.monotonic()
    assert silent(node.epilog())
    assert time.monotonic() - began < LIMIT_S + nobody_asked_s(node)
    assert '"ended_s": null' not in node.sh("cat /run/gemini-hpc.agents/7"), "the reaper ends it"
