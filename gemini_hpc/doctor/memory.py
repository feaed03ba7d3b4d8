"""Checks that there is room for the replicas beside jobs and slurmd, and of slurmd's systemd unit."""

from __future__ import annotations

import os

from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.doctor.facts import HostFacts, read_text
from gemini_hpc.doctor.finding import Outcome, Unavailable, report_ok, report_warning, report_wrong
from gemini_hpc.node.cgroup import SYSTEMD_BOOTED, find_lowest_limit, find_place
from gemini_hpc.node.meminfo import read_meminfo
from gemini_hpc.node.memory_cgroup import choose_cgroup

UNIT = "slurmd.service"
BOOT_UNIT = "gemini-hpc-boot.service"
_NOTHING = 0.05  # share of MemTotal that kernel and slurmd use anyway


def _format_mib(n: float) -> str:
    return f"{n / (1 << 20):,.0f} MiB"


def judge_carve_out(total: int, for_jobs: int, cap: int, consumable: bool) -> Outcome:
    """Judge the memory left for replicas. Sizes are in bytes.

    `for_jobs` is the memory that Slurm may give to jobs, `cap` the memory that one agent may use.
    """
    numbers = f"MemTotal {_format_mib(total)}, for jobs (RealMemory less MemSpecLimit) {_format_mib(for_jobs)}"
    numbers += f", cap {_format_mib(cap)}"
    wanted = f"RealMemory less MemSpecLimit of at most {_format_mib(total - cap)}"
    fix = f"RealMemory={max(0, total - cap) >> 20} for this node in slurm.conf, or a smaller memory_fraction"
    if not consumable:
        return report_warning(
            f"{numbers}; Slurm does not count memory (SelectTypeParameters): nothing keeps jobs out of the cap",
            "SelectTypeParameters with memory, and " + wanted,
            "SelectTypeParameters=CR_Core_Memory in slurm.conf",
        )
    if total - for_jobs >= cap:
        return report_ok(numbers)
    if total - for_jobs < _NOTHING * total:
        return report_wrong(
            f"{numbers}: nothing is left for replicas beside a job that uses all of its memory", wanted, fix
        )
    short = cap - (total - for_jobs)
    return report_warning(f"{numbers}: {_format_mib(short)} of the cap may be taken by jobs", wanted, fix)


def check_carve_out(facts: HostFacts) -> Outcome:
    """Check that Slurm does not give away the replica memory, which is not part of the job's memory."""
    node = facts.own_node
    if node is None or not node.memory_mb:
        raise Unavailable("Slurm has no RealMemory for this host")
    consumable = "MEMORY" in facts.conf["SelectTypeParameters"].upper()
    for_jobs = max(0, node.memory_mb - node.spec_memory_mb) << 20
    return judge_carve_out(read_meminfo()["MemTotal"], for_jobs, Budget(facts.settings).cap_bytes, consumable)


def judge_slurmd_limit(limit: tuple[int, str] | None, cap: int) -> Outcome:
    """Judge the `limit` of slurmd's cgroup: bytes, and the file that sets them."""
    if limit is None:
        return report_ok("slurmd's cgroup has no memory limit")
    size, path = limit
    if size < cap:
        return report_wrong(
            f"slurmd's cgroup is limited to {_format_mib(size)} ({path}), an agent's cap is {_format_mib(cap)}: "
            "where agents stay in it, replicas that fill it get slurmd killed",
            "no limit on slurmd's cgroup, or one above an agent's cap",
            "raise MemSpecLimit or MemoryMax of slurmd.service, or lower memory_fraction",
        )
    return report_ok(f"slurmd's cgroup is limited to {_format_mib(size)}, an agent's cap is {_format_mib(cap)}")


def check_slurmd_cgroup(facts: HostFacts) -> Outcome:
    """Check the limits of slurmd and of all that is still in its cgroup, which MemSpecLimit and units can set."""
    daemons = [p for p in facts.processes if p.name == "slurmd"]
    if not daemons:
        raise Unavailable("no slurmd runs here")
    place = find_place(daemons[0].pid)
    choice = choose_cgroup(place, facts.settings.agent_cgroup, systemd=os.path.isdir(SYSTEMD_BOOTED))
    if choice.how != "stay":
        return report_ok(f"agents leave slurmd's cgroup for {choice.directory or 'a scope of their own'}")
    if place is None:
        raise Unavailable("no memory cgroup is visible here")
    return judge_slurmd_limit(find_lowest_limit(place), Budget(facts.settings).cap_bytes)


def judge_kill_mode(value: str, where: str) -> Outcome:
    """Judge the `value` of KillMode= in the file `where`; "" means systemd's default."""
    if value in ("process", "none"):
        return report_ok(f"KillMode={value} in {where}")
    return report_wrong(
        f"{UNIT} has KillMode={value or 'control-group (the default)'}{f' in {where}' if where else ''}: "
        "a restart of slurmd kills the agents, and the running steps",
        "KillMode=process, as Slurm's own unit has it",
        f"systemctl edit {UNIT}: [Service] KillMode=process",
    )


def check_unit(facts: HostFacts) -> Outcome:
    """Check that a restart of slurmd does not kill the agents."""
    found = list_unit_files(UNIT)
    if not found:
        raise Unavailable(f"no {UNIT} in {', '.join(UNIT_DIRECTORIES)}: slurmd is started by something else")
    return judge_kill_mode(*read_unit_setting(found, "Service", "KillMode"))


# Later directories win: the administrator's files override those of packages.
UNIT_DIRECTORIES = ("/usr/lib/systemd/system", "/lib/systemd/system", "/run/systemd/system", "/etc/systemd/system")


def check_boot_unit(facts: HostFacts) -> Outcome:
    """Check that slurmd forgets the jobs of an earlier boot, whose prologs it would not run again."""
    if not os.path.isdir(SYSTEMD_BOOTED) or not list_unit_files(UNIT):
        raise Unavailable(f"no {UNIT}: see that gemini_hpc.node.boot runs before slurmd (docs/install.md, Steps)")
    wanted = f"{BOOT_UNIT} enabled"
    masks = [p for d in UNIT_DIRECTORIES if os.path.realpath(p := f"{d}/{BOOT_UNIT}") == os.devnull]
    if masks:
        return report_warning(
            f"{BOOT_UNIT} is masked by {masks[-1]}: a job that runs when this node loses power comes back to it "
            "unprotected",
            wanted,
            f"systemctl unmask {BOOT_UNIT}, and enable it",
        )
    if any(os.path.lexists(f"{d}/multi-user.target.wants/{BOOT_UNIT}") for d in UNIT_DIRECTORIES):
        return report_ok(wanted)
    return report_warning(
        f"{BOOT_UNIT} is not enabled: a job that runs when this node loses power comes back to it unprotected",
        wanted,
        f"systemctl enable {BOOT_UNIT.removesuffix('.service')}; not needed if slurmd's spool is lost with the power",
    )


def list_unit_files(unit: str, directories: tuple[str, ...] = UNIT_DIRECTORIES) -> list[str]:
    """Return the unit's file and its drop-ins, in order of precedence, lowest first; [] if there is none."""
    main = [p for d in directories if os.path.isfile(p := os.path.join(d, unit))]
    if not main:
        return []
    dropins: dict[str, str] = {}
    for directory in directories:
        place = os.path.join(directory, f"{unit}.d")
        if os.path.isdir(place):
            dropins |= {name: os.path.join(place, name) for name in os.listdir(place) if name.endswith(".conf")}
    return [main[-1], *(dropins[name] for name in sorted(dropins))]


def read_unit_setting(paths: list[str], section: str, key: str) -> tuple[str, str]:
    """Return (value, file) of the last assignment, empty if there is none. Raises OSError."""
    value, where = "", ""
    for path in paths:
        current_section = ""
        for line in map(str.strip, read_text(path).splitlines()):
            if line.startswith("[") and line.endswith("]"):
                current_section = line[1:-1]
            elif current_section == section and line.partition("=")[0].strip() == key and "=" in line:
                value, where = line.partition("=")[2].strip(), path
    return value, where
