"""Checks of slurmctld's configuration against the needs of gemini-hpc.

A private /run hides the agent's socket from ranks. The plugins job_container/tmpfs, and namespace/tmpfs and
namespace/linux (25.11 and later) can give each job one.
"""

from __future__ import annotations

import os
import pwd
import re

from gemini_hpc.doctor.facts import Configuration, HostFacts, SlurmRelease, read_text
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong

EDIT = "in slurm.conf, then scontrol reconfigure"
UNKILLABLE_S = 60.0  # Slurm's default; steps that hang on a dead node end within it
CRED_EXPIRE_S = 120.0  # Slurm's default
PROLOG_HELPER_S = 62.0  # the prolog's last-resort time-out of 60 s, and 2 s until its kill
EXPEDITED = SlurmRelease(25, 11, 3)


def check_answers(facts: HostFacts) -> Outcome:
    """Check that slurmctld answers, which all other checks here need."""
    try:
        running = facts.conf.release
    except Unavailable as exc:
        wanted = "an answer from slurmctld to `scontrol show config`"
        return report_wrong(
            str(exc), wanted, "start slurmctld, or set SLURM_CONF; most other checks are skipped until then"
        )
    if facts.release.series != running.series:
        found = f"slurmctld is {running}, this host has Slurm {facts.release}"
        return report_warning(found, "one release", "finish the upgrade; the plugin must fit each host's own release")
    return report_ok(f"slurmctld {running} answers")


def check_prolog_flags(facts: HostFacts) -> Outcome:
    """Check that agents start before the batch script, and outlive the job."""
    flags = facts.conf.parse_words("PrologFlags")
    shown = f"PrologFlags={facts.conf['PrologFlags'] or '(none)'}"
    if "runinjob" in flags:
        return report_wrong(
            f"{shown}: prologs run inside the job, so the agent is killed with the job",
            "PrologFlags with Alloc, without RunInJob",
            f"take RunInJob out of PrologFlags {EDIT} and restart slurmd",
        )
    if "alloc" not in flags:
        wanted = "PrologFlags with Alloc: prologs on all nodes before the batch script"
        return report_wrong(shown, wanted, f"PrologFlags=Alloc {EDIT} and restart slurmd")
    return report_ok(shown)


def check_user(facts: HostFacts) -> Outcome:
    """Check SlurmUser: agents encrypt their greeting for this user, and the controller runs as this user."""
    found = re.fullmatch(r"(.+)\(([0-9]+)\)", facts.conf["SlurmUser"])
    if not found:
        raise Unavailable(f"SlurmUser={facts.conf['SlurmUser'][:60]!r} is not understood")
    name, uid = found[1], int(found[2])
    if name != facts.settings.slurm_user:
        return report_wrong(
            f"slurm_user is {facts.settings.slurm_user!r}, Slurm's SlurmUser is {name!r}",
            "the same user in gemini.toml and slurm.conf",
            f'slurm_user = "{name}" in gemini.toml on all hosts, then start the controller again',
        )
    try:
        local_uid = pwd.getpwnam(name).pw_uid
    except KeyError:
        return report_wrong(f"there is no user {name!r} here", f"{name} with uid {uid}", "make the user on this host")
    if local_uid != uid:
        return report_wrong(
            f"{name} has uid {local_uid} here and {uid} at slurmctld", "one uid everywhere", "change one of them"
        )
    if uid == 0:
        return report_warning(
            "SlurmUser is root", "a user of its own", f"SlurmUser=slurm {EDIT}; see Slurm's quick start"
        )
    return report_ok(f"{name} (uid {uid})")


def check_cred_expire(facts: HostFacts) -> Outcome:
    """Check the credential lifetime, which applies to all users."""
    value = facts.conf.parse_words("AuthInfo").get("cred_expire", "")
    if value.isdigit() and 0 < int(value) < CRED_EXPIRE_S:
        return report_warning(
            f"AuthInfo has cred_expire={value}: job credentials of all users end after {value} s",
            f"Slurm's default of {CRED_EXPIRE_S:.0f} s",
            f"take cred_expire out of AuthInfo {EDIT}; gemini-hpc does not need it (requeue_delay, from 25.11.3 on)",
        )
    return report_ok(f"cred_expire is {value or f'{CRED_EXPIRE_S:.0f} (default)'}")


def check_job_requeue(facts: HostFacts) -> Outcome:
    """Check that jobs may be requeued, without which no job recovers from a node's death."""
    if facts.conf["JobRequeue"] == "0":
        found = "JobRequeue=0: only jobs submitted with --requeue are recovered from a node's death"
        return report_warning(found, "JobRequeue=1", f"JobRequeue=1 {EDIT}, or tell the users")
    return report_ok(f"JobRequeue={facts.conf['JobRequeue'] or '1'}")


def check_unkillable(facts: HostFacts) -> Outcome:
    """Check UnkillableStepTimeout.

    If it is short, Slurm drains healthy survivors whose step hangs on the dead node.
    """
    seconds = facts.conf.parse_number("UnkillableStepTimeout")
    if seconds is not None and seconds < UNKILLABLE_S:
        return report_wrong(
            f"UnkillableStepTimeout={seconds:.0f}: survivors are drained when a batch host dies",
            f"at least {UNKILLABLE_S:.0f} s",
            f"UnkillableStepTimeout={UNKILLABLE_S:.0f} {EDIT}",
        )
    return report_ok(f"UnkillableStepTimeout={facts.conf['UnkillableStepTimeout'] or 'default'}")


def check_return_to_service(facts: HostFacts) -> Outcome:
    """Report ReturnToService without judging it.

    A fenced node is also drained, so no value of the setting returns it to service by itself.
    """
    value = facts.conf["ReturnToService"] or "0"
    means = {
        "0": "a DOWN node stays so until it is resumed by hand",
        "1": "a node that was DOWN for being silent comes back when it registers",
        "2": "any DOWN node comes back when it registers; a fenced one stays drained all the same",
    }
    return report_ok(f"ReturnToService={value}: {means.get(value, 'not known here')}")


def check_prolog_failures(facts: HostFacts) -> Outcome:
    """Check for jobs being held after a failed prolog (another's, or ours with strict_prolog)."""
    parameters = facts.conf.parse_words("SchedulerParameters")
    if "nohold_on_prolog_fail" in parameters:
        return report_ok("SchedulerParameters has nohold_on_prolog_fail")
    return report_warning(
        "SchedulerParameters lacks nohold_on_prolog_fail: a job whose prolog fails on one node is held",
        "nohold_on_prolog_fail" + (", as strict_prolog is on" if facts.settings.strict_prolog else ""),
        f"add it to SchedulerParameters {EDIT}",
    )


def check_prolog_timeout(facts: HostFacts) -> Outcome:
    """Check the prolog's time limit: a prolog that Slurm cuts off drains the node."""
    limits = {key: facts.conf.parse_number(key) for key in ("PrologEpilogTimeout", "PrologTimeout")}
    key, seconds = min(((k, s) for k, s in limits.items() if s), key=lambda kv: kv[1], default=("", float("inf")))
    needed = facts.settings.attach_timeout_s + 5.0
    fix = f"{key}={PROLOG_HELPER_S:.0f} or more {EDIT}, or a shorter attach_timeout_s in gemini.toml"
    if seconds < needed:
        return report_wrong(
            f"{key}={seconds:.0f}, and the prolog may wait {facts.settings.attach_timeout_s:g} s for the agents: "
            "nodes are drained",
            f"at least {PROLOG_HELPER_S:.0f} s",
            fix,
        )
    if seconds < PROLOG_HELPER_S:
        found = f"{key}={seconds:.0f}: a hung file system drains the node before our own bound"
        return report_warning(found, f"at least {PROLOG_HELPER_S:.0f} s", fix)
    return report_ok("no limit" if seconds == float("inf") else f"{key}={seconds:.0f}")


def check_proctrack(facts: HostFacts) -> Outcome:
    """Check ProctrackType: linuxproc follows parents, and loses a process whose parent has died."""
    found = facts.conf["ProctrackType"]
    if found.endswith("linuxproc"):
        return report_warning(
            f"{found}: it loses an srun whose batch script died first, and that srun later kills the step of "
            "the same id in the job's next incarnation",
            "proctrack/cgroup",
            f"ProctrackType=proctrack/cgroup {EDIT} and restart slurmd without jobs",
        )
    return report_ok(found)


def check_over_memory_kill(facts: HostFacts) -> Outcome:
    """Check the memory limit: each rank maps its replicas' memory, which counts in RSS once per rank."""
    parameters = facts.conf.parse_words("JobAcctGatherParams")
    if "overmemorykill" in parameters and not {"usepss", "noshare", "noshared"} & parameters.keys():
        return report_wrong(
            "JobAcctGatherParams has OverMemoryKill and counts shared pages in full: replica memory that ranks "
            "map can kill their job",
            "UsePss or NoShared beside OverMemoryKill",
            f"add UsePss to JobAcctGatherParams {EDIT}",
        )
    return report_ok(f"JobAcctGatherParams={facts.conf['JobAcctGatherParams'] or '(none)'}")


def check_expedited_requeue(facts: HostFacts) -> Outcome:
    """Report whether expedited requeue is available and on, without judging it."""
    running = facts.conf.release
    if running < EXPEDITED:
        return report_ok(f"Slurm {running} has none (it came with {EXPEDITED})")
    everything = {**facts.conf.parse_words("SchedulerParameters"), **facts.conf.parse_words("SlurmctldParameters")}
    on = "enable_expedited_requeue" in everything
    return report_ok(f"enable_expedited_requeue is {'on: users may submit with --requeue=expedite' if on else 'off'}")


def check_detection(facts: HostFacts) -> Outcome:
    """Check how Slurm detects a dead node if no controller acts."""
    seconds = facts.conf.parse_number("SlurmdTimeout")
    if seconds is None:
        raise Unavailable("SlurmdTimeout is not known")
    if seconds in (0, float("inf")):
        found = "SlurmdTimeout=0: without the controller a dead node is never noticed, and its job never requeued"
        return report_warning(found, "a bound, 300 s by default", f"SlurmdTimeout=300 {EDIT}")
    return report_ok(f"SlurmdTimeout={seconds:.0f}: without the controller Slurm takes this long to find a dead node")


def check_cluster_name(facts: HostFacts) -> Outcome:
    """Check the cluster's name, which is part of every message's identity.

    Two clusters of one name would accept each other's messages.
    """
    ours, theirs = facts.settings.cluster_name, facts.conf["ClusterName"]
    if ours != theirs:
        found = f"cluster_name is {ours!r}, Slurm's ClusterName {theirs!r}"
        fix = f'cluster_name = "{theirs}" in gemini.toml on all hosts, with no protected job running'
        return report_warning(found, "the same name, as unique as Slurm's", fix)
    return report_ok(ours)


_NONE = ("", "none", "(null)")
_UNTRIED = ("CLONE_NEWPID", "CLONE_NEWUSER")


def find_container_plugin(conf: Configuration) -> str:
    """Return the plugin in effect, as the release names it; "" if there is none."""
    return next(
        (v for key in ("NamespaceType", "JobContainerType") if (v := conf[key]).rpartition("/")[2] not in _NONE), ""
    )


def list_file_names(plugin: str) -> tuple[str, ...]:
    """Return the names of the plugin's files beside slurm.conf; the first existing file counts."""
    older = ("namespace.conf", "job_container.conf")
    return ("namespace.yaml", *older) if plugin.endswith("linux") else older


def find_hidden_directories(text: str, directories: tuple[str, ...]) -> list[str]:
    """Return those of `directories` that each job gets a private copy of, by the text of one of these files."""
    found = re.findall(r"^[^#\n]*\bdirs\s*[=:]\s*[\"']?([^\s\"'#]+)", text, re.M | re.I)
    tops = [d.rstrip("/") or "/" for dirs in found for d in dirs.split(",") if d]
    return [d for d in directories if any(d == t or d.startswith(t.rstrip("/") + "/") for t in tops)]


def check_job_container(facts: HostFacts) -> Outcome:
    """Check that the ranks see their agent's directory."""
    plugin = find_container_plugin(facts.conf)
    if not plugin.endswith(("/tmpfs", "/linux")):
        return report_ok(plugin or "none")
    beside, names = os.path.dirname(facts.conf["SLURM_CONF"]), list_file_names(plugin)
    path = next((p for p in (os.path.join(beside, n) for n in names) if os.path.lexists(p)), "")
    if not path:
        raise Unavailable(f"{plugin}, and none of {', '.join(names)} is in {beside} on this host")
    try:
        text = read_text(path)
    except OSError as exc:
        raise Unavailable(f"{plugin}, and {path} cannot be read: {exc.strerror}") from None
    run_dir = facts.settings.run_dir
    if hidden := find_hidden_directories(text, (run_dir,)):
        return report_wrong(
            f"{path} gives each job its own {', '.join(hidden)}: ranks do not find their agent",
            f"dirs without {run_dir} and the directories above it",
            f"take it out of the dirs in {path}",
        )
    own = [flag for flag in _UNTRIED if re.search(rf"^[^#\n]*\b{flag}\b", text, re.M)]
    if own:
        return report_warning(
            f"{path} has {join_some(own, ', ')}: gemini-hpc is not tested in such a namespace",
            "jobs in the process and user namespace of their node",
            f"take the flags out of {path}, or run a protected job and check that gemini-hpc inspect says protected",
        )
    return report_ok(f"{plugin}, which does not hide {run_dir} (replica memory has no name in /dev/shm)")
