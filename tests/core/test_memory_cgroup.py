"""Requirement memory on hosts that cannot be had here: the choice of a memory cgroup, from texts of /proc as they are
there."""

from __future__ import annotations

from gemini_hpc.node import memory_cgroup
from gemini_hpc.node.memory_cgroup import Choice, Place

# Debian 12, Slurm by systemd: unified hierarchy only.
V2 = "0::/system.slice/slurmd.service\n"
V2_MOUNTS = """\
22 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
28 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""
# Rocky 8: v1 with systemd, a unified hierarchy without controllers beside it.
V1 = """\
12:pids:/system.slice/slurmd.service
9:memory:/system.slice/slurmd.service
4:cpu,cpuacct:/system.slice/slurmd.service
1:name=systemd:/system.slice/slurmd.service
0::/system.slice/slurmd.service
"""
V1_MOUNTS = """\
25 17 0:22 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:8 - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/systemd rw,nosuid,nodev,noexec,relatime shared:9 - cgroup cgroup rw,xattr,name=systemd
31 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct
33 25 0:30 / /sys/fs/cgroup/memory rw,nosuid,nodev,noexec,relatime shared:17 - cgroup cgroup rw,memory
41 25 0:38 / /sys/fs/cgroup/unified rw,relatime shared:18 - cgroup2 cgroup2 rw
"""
# slurmd in a container of v1: only its own part of the tree is mounted, and read-only.
CONTAINER = "9:memory:/docker/4f2a/slurm\n"
CONTAINER_MOUNTS = (
    "733 732 0:30 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid,relatime master:17 - cgroup cgroup rw,memory\n"
)
# A part of the tree bound over the whole: what is mounted later is on top. The path has a space.
COVERED = "4:memory:/clusters/a b/n1/slurmd\n"
COVERED_MOUNTS = """\
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
90 35 0:32 /clusters/a\\040b/n1 /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""


def test_v2_under_systemd_is_asked_of_systemd() -> None:
    here = memory_cgroup.parse_place(V2, V2_MOUNTS)
    assert here == Place(2, "/sys/fs/cgroup", "/system.slice/slurmd.service", True)
    assert memory_cgroup.choose_cgroup(here, "", systemd=True) == Choice("systemd")
    argv = memory_cgroup.build_scope_call("/usr/bin/busctl", 7, 4711, 1 << 30)
    assert argv == [
        *("/usr/bin/busctl", "--timeout=2", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"),
        *("org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"),
        *("geminihpc-7-4711.scope", "fail", "7"),
        *("PIDs", "au", "1", "4711", "Slice", "s", "geminihpc.slice"),  # a dash in the name would nest it
        *("MemoryMax", "t", str(1 << 30), "MemorySwapMax", "t", "0"),
        *("CPUWeight", "t", "100", "TasksMax", "t", "512", "DevicePolicy", "s", "closed"),
        "0",
    ]


def test_v2_without_systemd_is_made_of_files() -> None:
    here = memory_cgroup.parse_place("0::/slurmd\n", V2_MOUNTS)
    assert here is not None
    choice = memory_cgroup.choose_cgroup(here, "/site/gemini", systemd=False)
    assert choice == Choice("v2", "/sys/fs/cgroup/site/gemini")
    steps = [
        (s.path.removeprefix("/sys/fs/cgroup"), s.text)
        for s in memory_cgroup.plan_agents_cgroup(here, choice, 1000, 0)
    ]
    assert steps == [
        *(("/cgroup.subtree_control", f"+{name}") for name in ("memory", "cpu", "pids")),
        ("/site", None),
        *(("/site/cgroup.subtree_control", f"+{name}") for name in ("memory", "cpu", "pids")),
        ("/site/gemini", None),
        ("/site/gemini/memory.swap.max", "0"),
        ("/site/gemini/memory.max", "1000"),
    ]
    of_job = memory_cgroup.plan_job_cgroup(here, choice, 7, 900)
    steps = [(s.path.removeprefix("/sys/fs/cgroup/site/gemini"), s.text) for s in of_job]
    assert steps == [
        *(("/cgroup.subtree_control", f"+{name}") for name in ("memory", "cpu", "pids")),
        ("/7", None),
        ("/7/memory.max", "900"),
        ("/7/memory.swap.max", "0"),
        ("/7/cpu.weight", "100"),
        ("/7/pids.max", "512"),
    ]
    needed = [s.path.rpartition("/")[2] for s in of_job if s.needed]
    assert needed == ["cgroup.subtree_control", "7", "memory.max"], "without CPU or tasks it is a cgroup all the same"


def test_job_has_a_cgroup_in_each_hierarchy_of_v1_that_is_there() -> None:
    found = memory_cgroup.plan_other_hierarchies(V1_MOUNTS, "/gemini-hpc", 7)
    (at,) = found
    assert at == "/sys/fs/cgroup/cpu,cpuacct/gemini-hpc/7", "neither devices nor pids are mounted there"
    assert [(s.path.removeprefix("/sys/fs/cgroup/cpu,cpuacct"), s.text, s.needed) for s in found[at]] == [
        ("/gemini-hpc", None, True),
        ("/gemini-hpc/7", None, True),
        ("/gemini-hpc/7/cpu.shares", "1024", False),
    ]
    more = "50 25 0:40 / /sys/fs/cgroup/{0} {1} shared:20 - cgroup cgroup rw,{0}\n"
    both = V1_MOUNTS + more.format("devices", "rw") + more.format("pids", "ro")
    steps = [
        s.text
        for s in memory_cgroup.plan_other_hierarchies(both, "/site/agents", 7)["/sys/fs/cgroup/devices/site/agents/7"]
    ]
    assert steps[:4] == [None, None, None, "a"] and "c 1:3 rwm" in steps and len(steps) == 10, "denied first"
    assert not [at for at in memory_cgroup.plan_other_hierarchies(both, "/site/agents", 7) if "pids" in at], (
        "read-only"
    )
    joint = V1_MOUNTS.replace("cpu,cpuacct", "cpu,pids")
    steps = [
        s.text
        for s in memory_cgroup.plan_other_hierarchies(joint, "/gemini-hpc", 7)["/sys/fs/cgroup/cpu,pids/gemini-hpc/7"]
    ]
    assert steps == [None, None, "1024", "512"], "two controllers in one hierarchy"


def test_a_limit_is_never_put_below_what_is_taken() -> None:
    """On v2 that would kill the agents of the jobs that run."""
    here = Place(2, "/cg", "/slurmd", True)
    choice = memory_cgroup.choose_cgroup(here, "", systemd=False)
    assert not any(s.path.endswith("memory.max") for s in memory_cgroup.plan_agents_cgroup(here, choice, 1000, 1001))
    assert any(s.path.endswith("memory.max") for s in memory_cgroup.plan_agents_cgroup(here, choice, 1000, 1000))


def test_v1_beside_slurmd_with_or_without_systemd() -> None:
    here = memory_cgroup.parse_place(V1, V1_MOUNTS)
    assert here == Place(1, "/sys/fs/cgroup/memory", "/system.slice/slurmd.service", True)
    for systemd in (True, False):
        assert memory_cgroup.choose_cgroup(here, "", systemd=systemd) == Choice(
            "v1", "/sys/fs/cgroup/memory/gemini-hpc"
        )
    choice = memory_cgroup.choose_cgroup(here, "", systemd=True)
    last = memory_cgroup.plan_agents_cgroup(here, choice, 1000, 0)[-1]
    assert (last.path, last.text) == ("/sys/fs/cgroup/memory/gemini-hpc/memory.limit_in_bytes", "1000")
    assert list(here.walk_up()) == [
        "/sys/fs/cgroup/memory/system.slice/slurmd.service",
        "/sys/fs/cgroup/memory/system.slice",
        "/sys/fs/cgroup/memory",
    ]


def test_containers() -> None:
    here = memory_cgroup.parse_place(CONTAINER, CONTAINER_MOUNTS)
    assert here == Place(1, "/sys/fs/cgroup/memory", "/slurm", False)
    assert "read-only" in memory_cgroup.choose_cgroup(here, "", systemd=False).why
    assert memory_cgroup.parse_place("9:memory:/elsewhere\n", CONTAINER_MOUNTS) is None
    assert memory_cgroup.parse_place("9:memory:/../other\n", V1_MOUNTS) is None
    assert memory_cgroup.parse_place(COVERED, COVERED_MOUNTS) == Place(1, "/sys/fs/cgroup/memory", "/slurmd", True)


def test_what_the_agent_stays_for() -> None:
    for setting, why in (
        ("none", ""),
        ("/system.slice/slurmd.service/gemini", "slurmd's own"),
        ("/system.slice/slurmd.service", "slurmd's own"),
        ("gemini", "wanted a path"),
        ("/../gemini", "wanted a path"),
        ("/", "wanted a path"),
        ("/a//b", "wanted a path"),
    ):
        choice = memory_cgroup.choose_cgroup(memory_cgroup.parse_place(V1, V1_MOUNTS), setting, systemd=False)
        assert choice.how == "stay" and why in choice.why and bool(why) == bool(choice.why), setting


def test_no_memory_cgroup_is_nothing_to_leave() -> None:
    assert (
        memory_cgroup.parse_place("", "") is None
        and memory_cgroup.parse_place("1:name=systemd:/\n", V1_MOUNTS) is None
    )
    assert (
        memory_cgroup.parse_place(V1, "") is None
        and memory_cgroup.parse_place("nonsense\n::\n", "a b - c\n\n") is None
    )
    assert memory_cgroup.choose_cgroup(None, "", systemd=True) == Choice("stay")
    assert "no memory cgroup" in memory_cgroup.choose_cgroup(None, "/gemini-hpc", systemd=True).why


def test_what_is_left_of_a_limit() -> None:
    assert memory_cgroup.compute_free_bytes(1, "9223372036854771712\n", "5\n", "") is None
    assert memory_cgroup.compute_free_bytes(2, "max\n", "5\n", "") is None
    assert (
        memory_cgroup.compute_free_bytes(
            1, "100\n", "70\n", "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 5\n"
        )
        == 55
    )
    assert memory_cgroup.compute_free_bytes(2, "100\n", "170\n", "anon 3\ninactive_file 20\nactive_file 5\n") == 0


def test_what_is_a_jobs_and_what_is_held_in_it() -> None:
    def jobs(path: str, setting: str = "") -> bool:
        return memory_cgroup.is_job_cgroup(Place(2, "/sys/fs/cgroup", path, True), setting)

    assert (
        jobs("/gemini-hpc/7") and jobs("/site/agents/7", "/site/agents/") and jobs("/site/agents/7", "/site/agents")
    )
    assert jobs("/geminihpc.slice/geminihpc-7-4711.scope")
    for other in ("/", "/7", "/gemini-hpc", "/gemini-hpc/x", "/user.slice/7", "/user.slice/geminihpc-7-4711.scope"):
        assert not jobs(other), other
    assert not jobs("/gemini-hpc/7", "/site/agents")
    assert memory_cgroup.count_held_bytes(1, "shmem 1\ntotal_shmem 20\ntotal_inactive_file 7\n") == 20
    assert memory_cgroup.count_held_bytes(2, "anon 5\nshmem 30\n") == 30
    assert memory_cgroup.count_held_bytes(2, "") == 0
    assert memory_cgroup.parse_limit("max\n") is memory_cgroup.parse_limit(f"{(1 << 63) - 4096}\n") is None
    assert memory_cgroup.parse_limit("4096\n") == 4096


def test_systemd_is_asked_for_another_limit() -> None:
    assert memory_cgroup.build_resize_call("/usr/bin/busctl", "geminihpc-7-4711.scope", 1 << 30)[-7:] == [
        *("sba(sv)", "geminihpc-7-4711.scope", "true", "1", "MemoryMax", "t", str(1 << 30)),
    ]
