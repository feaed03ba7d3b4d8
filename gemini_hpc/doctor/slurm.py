"""Checks of slurmctld's configuration against the needs of gemini-hpc."""

from __future__ import annotations

import pwd
import re

from gemini_hpc.doctor.check import ANYWHERE, Check
from gemini_hpc.doctor.configuration import SlurmRelease
from gemini_hpc.doctor.containers import job_container
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, ok, warning, wrong

EDIT = "in slurm.conf, then scontrol reconfigure"
UNKILLABLE_S = 60.0
CRED_EXPIRE_S = 120.0
PROLOG_HELPER_S = 62.0  # the prolog's last-resort time-out of 60 s, and 2 s until its kill
EXPEDITED = SlurmRelease(25, 11, 3)


def answers(facts: HostFacts) -> Outcome:
    """Check that slurmctld answers, which all other checks here need."""
    try:
        running = facts.conf.release
    except Unavailable as exc:
        wanted = "an answer from slurmctld to `scontrol show config`"
        return wrong(str(exc), wanted, "start slurmctld, or set SLURM_CONF; most other checks are skipped until then")
    if facts.release.series != running.series:
        found = f"slurmctld is {running}, this host has Slurm {facts.release}"
        return warning(found, "one release", "finish the upgrade; the plugin must fit each host's own release")
    return ok(f"slurmctld {running} answers")


def prolog_flags(facts: HostFacts) -> Outcome:
    """Check that agents start before the batch script, and outlive the job."""
    flags = facts.conf.words("PrologFlags")
    shown = f"PrologFlags={facts.conf['PrologFlags'] or '(none)'}"
    if "runinjob" in flags:
        return wrong(
            f"{shown}: prologs run inside the job, so the agent is killed with the job",
            "PrologFlags with Alloc, without RunInJob",
            f"take RunInJob out of PrologFlags {EDIT} and restart slurmd",
        )
    if "alloc" not in flags:
        wanted = "PrologFlags with Alloc: prologs on all nodes before the batch script"
        return wrong(shown, wanted, f"PrologFlags=Alloc {EDIT} and restart slurmd")
    return ok(shown)


def slurm_user(facts: HostFacts) -> Outcome:
    """Check SlurmUser: agents encrypt their greeting for this user, and the controller runs as this user."""
    found = re.fullmatch(r"(.+)\(([0-9]+)\)", facts.conf["SlurmUser"])
    if not found:
        raise Unavailable(f"SlurmUser={facts.conf['SlurmUser'][:60]!r} is not understood")
    name, uid = found[1], int(found[2])
    if name != facts.settings.slurm_user:
        return wrong(
            f"slurm_user is {facts.settings.slurm_user!r}, Slurm's SlurmUser is {name!r}",
            "the same user in gemini.toml and slurm.conf",
            f'slurm_user = "{name}" in gemini.toml on all hosts, then start the controller again',
        )
    try:
        here = pwd.getpwnam(name).pw_uid
    except KeyError:
        return wrong(f"there is no user {name!r} here", f"{name} with uid {uid}", "make the user on this host")
    if here != uid:
        return wrong(f"{name} has uid {here} here and {uid} at slurmctld", "one uid everywhere", "change one of them")
    if uid == 0:
        return warning("SlurmUser is root", "a user of its own", f"SlurmUser=slurm {EDIT}; see Slurm's quick start")
    return ok(f"{name} (uid {uid})")


def cred_expire(facts: HostFacts) -> Outcome:
    """Check the credential lifetime, which applies to all users."""
    value = facts.conf.words("AuthInfo").get("cred_expire", "")
    if value.isdigit() and 0 < int(value) < CRED_EXPIRE_S:
        return warning(
            f"AuthInfo has cred_expire={value}: job credentials of all users end after {value} s",
            f"Slurm's default of {CRED_EXPIRE_S:.0f} s",
            f"take cred_expire out of AuthInfo {EDIT}; gemini-hpc does not need it (requeue_delay, from 25.11.3 on)",
        )
    return ok(f"cred_expire is {value or f'{CRED_EXPIRE_S:.0f} (default)'}")


def job_requeue(facts: HostFacts) -> Outcome:
    """Check that jobs may be requeued, without which no job recovers from a node's death."""
    if facts.conf["JobRequeue"] == "0":
        found = "JobRequeue=0: only jobs submitted with --requeue are recovered from a node's death"
        return warning(found, "JobRequeue=1", f"JobRequeue=1 {EDIT}, or tell the users")
    return ok(f"JobRequeue={facts.conf['JobRequeue'] or '1'}")


def unkillable(facts: HostFacts) -> Outcome:
    """Check UnkillableStepTimeout.

    If it is short, Slurm drains healthy survivors whose step hangs on the dead node.
    """
    seconds = facts.conf.number("UnkillableStepTimeout")
    if seconds is not None and seconds < UNKILLABLE_S:
        return wrong(
            f"UnkillableStepTimeout={seconds:.0f}: survivors are drained when a batch host dies",
            f"at least {UNKILLABLE_S:.0f} s",
            f"UnkillableStepTimeout={UNKILLABLE_S:.0f} {EDIT}",
        )
    return ok(f"UnkillableStepTimeout={facts.conf['UnkillableStepTimeout'] or 'default'}")


def return_to_service(facts: HostFacts) -> Outcome:
    """Report ReturnToService without judging it.

    A fenced node is also drained, so no value of the setting returns it to service by itself.
    """
    value = facts.conf["ReturnToService"] or "0"
    means = {
        "0": "a DOWN node stays so until it is resumed by hand",
        "1": "a node that was DOWN for being silent comes back when it registers",
        "2": "any DOWN node comes back when it registers; a fenced one stays drained all the same",
    }
    return ok(f"ReturnToService={value}: {means.get(value, 'not known here')}")


def prolog_failures(facts: HostFacts) -> Outcome:
    """Check for jobs being held after a failed prolog (another's, or ours with strict_prolog)."""
    parameters = facts.conf.words("SchedulerParameters")
    if "nohold_on_prolog_fail" in parameters:
        return ok("SchedulerParameters has nohold_on_prolog_fail")
    return warning(
        "SchedulerParameters lacks nohold_on_prolog_fail: a job whose prolog fails on one node is held",
        "nohold_on_prolog_fail" + (", as strict_prolog is on" if facts.settings.strict_prolog else ""),
        f"add it to SchedulerParameters {EDIT}",
    )


def prolog_timeout(facts: HostFacts) -> Outcome:
    """Check the prolog's time limit: a prolog that Slurm cuts off drains the node."""
    limits = {key: facts.conf.number(key) for key in ("PrologEpilogTimeout", "PrologTimeout")}
    key, seconds = min(((k, s) for k, s in limits.items() if s), key=lambda kv: kv[1], default=("", float("inf")))
    needed = facts.settings.attach_timeout_s + 5.0
    fix = f"{key}={PROLOG_HELPER_S:.0f} or more {EDIT}, or a shorter attach_timeout_s in gemini.toml"
    if seconds < needed:
        return wrong(
            f"{key}={seconds:.0f}, and the prolog may wait {facts.settings.attach_timeout_s:g} s for the agents: "
            "nodes are drained",
            f"at least {PROLOG_HELPER_S:.0f} s",
            fix,
        )
    if seconds < PROLOG_HELPER_S:
        found = f"{key}={seconds:.0f}: a hung file system drains the node before our own bound"
        return warning(found, f"at least {PROLOG_HELPER_S:.0f} s", fix)
    return ok("no limit" if seconds == float("inf") else f"{key}={seconds:.0f}")


def proctrack(facts: HostFacts) -> Outcome:
    """Check ProctrackType: linuxproc follows parents, and loses a process whose parent has died."""
    found = facts.conf["ProctrackType"]
    if found.endswith("linuxproc"):
        return warning(
            f"{found}: it loses an srun whose batch script died first, and that srun later kills the step of "
            "the same id in the job's next incarnation",
            "proctrack/cgroup",
            f"ProctrackType=proctrack/cgroup {EDIT} and restart slurmd without jobs",
        )
    return ok(found)


def over_memory_kill(facts: HostFacts) -> Outcome:
    """Check the memory limit: each rank maps its replicas' memory, which counts in RSS once per rank."""
    parameters = facts.conf.words("JobAcctGatherParams")
    if "overmemorykill" in parameters and not {"usepss", "noshare", "noshared"} & parameters.keys():
        return wrong(
            "JobAcctGatherParams has OverMemoryKill and counts shared pages in full: replica memory that ranks "
            "map can kill their job",
            "UsePss or NoShared beside OverMemoryKill",
            f"add UsePss to JobAcctGatherParams {EDIT}",
        )
    return ok(f"JobAcctGatherParams={facts.conf['JobAcctGatherParams'] or '(none)'}")


def expedited(facts: HostFacts) -> Outcome:
    """Report whether expedited requeue is available and on, without judging it."""
    running = facts.conf.release
    if running < EXPEDITED:
        return ok(f"Slurm {running} has none (it came with {EXPEDITED})")
    everything = {**facts.conf.words("SchedulerParameters"), **facts.conf.words("SlurmctldParameters")}
    on = "enable_expedited_requeue" in everything
    return ok(f"enable_expedited_requeue is {'on: users may submit with --requeue=expedite' if on else 'off'}")


def detection(facts: HostFacts) -> Outcome:
    """Check how Slurm detects a dead node if no controller acts."""
    seconds = facts.conf.number("SlurmdTimeout")
    if seconds is None:
        raise Unavailable("SlurmdTimeout is not known")
    if seconds in (0, float("inf")):
        found = "SlurmdTimeout=0: without the controller a dead node is never noticed, and its job never requeued"
        return warning(found, "a bound, 300 s by default", f"SlurmdTimeout=300 {EDIT}")
    return ok(f"SlurmdTimeout={seconds:.0f}: without the controller Slurm takes this long to find a dead node")


def cluster_name(facts: HostFacts) -> Outcome:
    """Check the cluster's name, which is part of every message's identity.

    Two clusters of one name would accept each other's messages.
    """
    ours, theirs = facts.settings.cluster_name, facts.conf["ClusterName"]
    if ours != theirs:
        found = f"cluster_name is {ours!r}, Slurm's ClusterName {theirs!r}"
        fix = f'cluster_name = "{theirs}" in gemini.toml on all hosts, with no protected job running'
        return warning(found, "the same name, as unique as Slurm's", fix)
    return ok(ours)


CHECKS = (
    Check("slurm.answers", "prove-death", ANYWHERE, answers),
    Check("slurm.prolog-flags", "memory", ANYWHERE, prolog_flags),
    Check("slurm.user", "one-controller", ANYWHERE, slurm_user),
    Check("slurm.cluster-name", "believe-slurm", ANYWHERE, cluster_name),
    Check("slurm.cred-expire", "slurms-own-timers", ANYWHERE, cred_expire),
    Check("slurm.job-requeue", "requeue", ANYWHERE, job_requeue),
    Check("slurm.unkillable", "administrators-resume", ANYWHERE, unkillable),
    Check("slurm.return-to-service", "administrators-resume", ANYWHERE, return_to_service),
    Check("slurm.prolog-failures", "users-errors", ANYWHERE, prolog_failures),
    Check("slurm.prolog-timeout", "users-errors", ANYWHERE, prolog_timeout),
    Check("slurm.proctrack", "survivors-raise-first", ANYWHERE, proctrack),
    Check("slurm.over-memory-kill", "not-a-failure", ANYWHERE, over_memory_kill),
    Check("slurm.job-container", "private directories", ANYWHERE, job_container),
    Check("slurm.expedited-requeue", "slurms-own-timers", ANYWHERE, expedited),
    Check("slurm.detection", "prove-death", ANYWHERE, detection),
)
