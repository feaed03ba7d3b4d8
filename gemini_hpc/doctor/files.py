"""Checks of files that root and job owners run or read: contents, who can change them, who can use them.

An installation under umask 027 or 077, or with an interpreter below root's home, works for root alone.
Prologs start then, and no job is protected.
"""

from __future__ import annotations

import glob
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress

from gemini_hpc import __version__, paths
from gemini_hpc.agent.peers import failure_domains
from gemini_hpc.config import ConfigError, load_site_settings
from gemini_hpc.core.topology import TopologyError
from gemini_hpc.doctor import installation, plugin
from gemini_hpc.doctor.facts import CONTROLLER, NODE, HostFacts, run_program
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong
from gemini_hpc.doctor.installation import PYTHON
from gemini_hpc.node import job_directory

CVE = "CVE-2016-10030"
_INTERPRETER_TIMEOUT_S = 10.0  # imports from a shared file system that is busy
_MAX_FILES = 20_000
_ASK = """
import sys, gemini_hpc, msgspec, xxhash
from importlib.util import find_spec
lacks = " ".join(name for name in ("h5py", "numpy") if find_spec(name) is None)
print(gemini_hpc.__version__, gemini_hpc.__file__, lacks, *sys.path, sep="\\n")
"""


def _check_rights(files: list[str], subject: str) -> Outcome:
    """Check that only root can replace any of `files`."""
    problems, missing = [], []
    for path in dict.fromkeys(files):
        try:
            problems += paths.find_weaknesses(path)
        except PermissionError as exc:
            raise Unavailable(f"{exc.filename}: only root can see it; run it again as root") from None
        except OSError as exc:
            missing.append(f"{path}: {exc.strerror}")
    wanted = f"{subject}, every directory above and every link's target: root's, writable by root only"
    if problems:
        return report_wrong(join_some(problems), wanted, "chown root:root and chmod go-w the named paths")
    if missing:
        return report_wrong(join_some(missing), wanted, "install what is missing")
    return report_ok(join_some(files, ", "))


def check_settings(facts: HostFacts) -> Outcome:
    """Check the settings file, which root's prolog obeys."""
    path = facts.config_path
    if not os.path.lexists(path):
        return report_warning(
            f"{path} does not exist: defaults only", "the same file on all hosts", "see docs/admin.md, Settings"
        )
    access = _check_rights([path], path)
    if access.status != "ok":
        return access
    try:
        load_site_settings(path)
    except ConfigError as exc:
        text = "what docs/admin.md, Settings, lists"
        return report_wrong(f"{exc}: prologs start no agent, the controller does not start", text, "correct the file")
    return report_ok(f"{path}, sha256 {facts.here.settings_sha256}... (doctor --cluster compares it over the nodes)")


def check_scripts(facts: HostFacts) -> Outcome:
    """Check Prolog and Epilog, which run as root on every node."""
    files = []
    for kind in ("Prolog", "Epilog"):
        for path in installation.list_scripts(facts.conf, kind):
            if not os.path.lexists(path) and NODE not in facts.roles:
                continue
            files.append(path)
            try:
                called = installation.find_our_script(path, kind)
            except OSError:
                continue
            files += [called] if called else []
    if not files:
        raise Unavailable("no Prolog and Epilog on this host")
    return _check_rights(files, "the scripts")


def check_plugin(facts: HostFacts) -> Outcome:
    """Check the plugin, which slurmstepd loads as root."""
    seen: set[str] = set()
    path = plugin.find_plugstack(facts)
    try:
        found = [line.path for line in plugin.read_lines(path, facts.conf["PluginDir"], seen)]
    except OSError as exc:
        raise Unavailable(f"{path}: {exc.strerror}") from None
    ours = [p for p in found if os.path.basename(p) == plugin.NAME and os.path.lexists(p)]
    return _check_rights([*sorted(seen), *ours], "plugin and plugstack.conf")


def query_interpreter() -> list[str]:
    """Return facts on the interpreter of prolog and epilog.

    The facts are version, package, modules missing for the tier, and search path. Raises `Unavailable` and
    `InterpreterError`.
    """
    try:
        if os.geteuid() == 0 and paths.find_weaknesses(PYTHON):
            raise Unavailable(f"{PYTHON} is not run as root, others can change it (see files.python)")
        done = run_program([PYTHON, "-I", "-c", _ASK], _INTERPRETER_TIMEOUT_S, LC_ALL="C.UTF-8")
    except subprocess.TimeoutExpired:
        raise InterpreterError(f"{PYTHON} gave no answer within {_INTERPRETER_TIMEOUT_S:g} s") from None
    except OSError as exc:
        raise InterpreterError(f"{PYTHON}: {exc.strerror}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise InterpreterError(f"{PYTHON} cannot import gemini_hpc: {' '.join(last)[:200]}")
    return done.stdout.splitlines()


def _find_code() -> tuple[list[str], list[str]]:
    """Return the search path of that interpreter, and the directories of the packages.

    Raises as `query_interpreter`, and ValueError for an answer that is too short.
    """
    _, package, _, *search = query_interpreter()
    others = [os.path.join(place, name) for place in search for name in ("msgspec", "xxhash")]
    return search, [os.path.dirname(package), *filter(os.path.isdir, others)]


class InterpreterError(Exception):
    """The error that the interpreter of prolog and epilog is unusable; its text gives the reason."""


def check_version(facts: HostFacts) -> Outcome:
    """Check that prologs start this version."""
    wanted = f"gemini-hpc {__version__}, as this command"
    fix = f"install it with {os.path.dirname(PYTHON)}/pip (docs/install.md)"
    if NODE not in facts.roles and CONTROLLER not in facts.roles and not os.path.lexists(PYTHON):
        return report_ok(f"no {PYTHON} on this host, and no prolog that needs it")
    try:
        found, *_ = [*query_interpreter(), "?"]
    except InterpreterError as exc:
        return report_wrong(str(exc), wanted, fix)
    if found != __version__:
        return report_wrong(f"{PYTHON} has gemini-hpc {found}", wanted, fix)
    return report_ok(found)


def check_tier(facts: HostFacts) -> Outcome:
    """Check for the packages with which agents write and read HDF5 for jobs with a tier."""
    try:
        _, _, lacks, *_ = query_interpreter()
    except (InterpreterError, ValueError) as exc:
        raise Unavailable(f"{exc} (see files.version)") from None
    if not lacks:
        return report_ok(f"{PYTHON} has h5py and numpy")
    where = facts.settings.tier or "--gemini-tier"
    found, wanted = f"{PYTHON} has no {lacks.replace(' ', ' and no ')}", f"h5py and numpy, for jobs with {where}"
    fix = f"{os.path.dirname(PYTHON)}/pip install 'h5py>=3.10' 'numpy>=1.26'"
    return report_wrong(found, wanted, fix) if facts.settings.tier else report_warning(found, wanted, fix)


def walk_files(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the first `_MAX_FILES` directories and files from `top` on, links not followed."""
    seen = 0
    for directory, _, names in os.walk(top):
        for name in [".", *names]:
            seen += 1
            if seen > _MAX_FILES:
                return
            path = os.path.normpath(os.path.join(directory, name))
            try:
                yield path, os.lstat(path)
            except OSError:
                continue


def check_python(facts: HostFacts) -> Outcome:
    """Check interpreter, search path and packages, all of which is code that root's prolog runs."""
    if NODE not in facts.roles and not os.path.lexists(PYTHON):
        return report_ok(f"no {PYTHON} on this host, and no prolog that needs it")
    chain = _check_rights([PYTHON], "the interpreter")
    if chain.status != "ok":
        return chain
    try:
        search, modules = _find_code()
    except (InterpreterError, ValueError):
        return chain
    # A missing file could be created later; but a missing zip lies in a directory that is checked.
    existing = [p for p in (*search, *modules) if os.path.lexists(p)]
    roots = _check_rights([PYTHON, *existing], "the interpreter, its search path and packages")
    if roots.status != "ok":
        return roots
    within = [
        w
        for top in modules
        for p, i in walk_files(os.path.realpath(top))
        if (w := paths.find_weakness(p, i, frozenset((0,))))
    ]
    for place in search:
        if os.path.isdir(place):
            entries = [(p, os.lstat(p)) for p in (os.path.join(place, n) for n in os.listdir(place))]
            within += [w for p, i in entries if (w := paths.find_weakness(p, i, frozenset((0,))))]
    if within:
        text = "every file of the packages: root's, writable by root only"
        return report_wrong(
            join_some(within),
            text,
            f"chown -R root:root and chmod -R go-w {os.path.dirname(os.path.dirname(PYTHON))}",
        )
    return report_ok(f"{PYTHON}, {modules[0]}")


def check_run_dir(facts: HostFacts) -> Outcome:
    """Check the directory that root works in."""
    path = facts.settings.run_dir
    wanted = f"{path}: a directory of root's, mode 0755, in directories of root's"
    fix = "remove it when no protected job runs here; the prolog makes it anew. Find out who made it"
    above = paths.find_weaknesses(os.path.dirname(path.rstrip("/")) or "/")
    if above:
        return report_wrong(join_some(above), wanted, "choose another run_dir, or correct the directories above")
    try:
        fd = job_directory.open_run_dir(path, create=False)
    except FileNotFoundError:
        return report_ok(f"{path} does not exist yet (the first protected job's prolog makes it)")
    except job_directory.JobDirError as exc:
        return report_wrong(str(exc), wanted, fix)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    if mode & 0o055 != 0o055:
        found = f"{path} has mode {mode:04o}: users cannot reach their job's socket"
        return report_wrong(found, wanted, f"chmod 0755 {path}")
    return report_ok(f"{path}, root, {mode:04o}")


def check_state_dir(facts: HostFacts) -> Outcome:
    """Check the controller's directory, whose contents it trusts: budget, open recoveries, owners of jobs."""
    path, owner = facts.settings.state_dir, facts.slurm_uid
    wanted = f"{path}: {facts.settings.slurm_user}'s, mode 0700, in directories of root's"
    try:
        info = os.lstat(path)
        weak = paths.find_weaknesses(path, frozenset((0, owner)))
    except FileNotFoundError:
        return report_wrong(f"{path} does not exist", wanted, "start the controller once as root, or make it")
    except PermissionError as exc:
        raise Unavailable(f"{exc.filename}: only root can see it; run it again as root") from None
    fix = f"chown {facts.settings.slurm_user} {path}; chmod 0700 {path}"
    if not stat.S_ISDIR(info.st_mode) and not os.path.isdir(path):
        return report_wrong(f"{path} is not a directory", wanted, fix)
    if os.stat(path).st_uid != owner:
        return report_wrong(f"{path} belongs to {paths.name_user(os.stat(path).st_uid)}", wanted, fix)
    if weak:
        return report_wrong(join_some(weak), wanted, fix)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        return report_warning(
            f"{path} has mode {mode:04o}: other users can read job events", wanted, f"chmod 0700 {path}"
        )
    return report_ok(f"{path}, {facts.settings.slurm_user}, {mode:04o}")


def check_domains(facts: HostFacts) -> Outcome:
    """Check that the file exists, is readable for every job's owner, and names this node."""
    setting = facts.settings.failure_domains
    if setting == failure_domains.NONE:
        return report_ok('"none": nodes side by side hold each other\'s copies')
    path = failure_domains.find_path(setting)
    if not path:
        return report_ok(f"no {' and no '.join(failure_domains.SLURMS)}: nodes side by side hold each other's copies")
    wanted, fix = f"{path}, which says what fails together", 'see docs/admin.md, Failure domains; or set it to "none"'
    try:
        found = failure_domains.read(setting)
        if not os.stat(path).st_mode & stat.S_IROTH:
            return report_wrong(f"{path} cannot be read by every job's owner", wanted, f"chmod o+r {path}")
    except OSError as error:
        return report_wrong(f"{path}: {error.strerror}", wanted, fix)
    except TopologyError as error:
        return report_wrong(str(error), wanted, fix)
    node = facts.own_node
    if node is not None and node.name not in found:
        return report_warning(f"{path} does not name {node.name}", f"all nodes named in {path}", fix)
    return report_ok(f"{path}: {len(found)} nodes in {len(set(found.values()))} domains")


FIX = (
    "install again under umask 022 with an interpreter that everybody can reach, such as /usr/bin/python3 "
    "(docs/install.md, Steps); or run chmod -R go+rX on the named paths, except root's home"
)


def _list_code() -> list[str]:
    """Return the interpreter, its environment's packages, and its search path if it can report one."""
    environment = os.path.dirname(os.path.dirname(PYTHON))
    places = [PYTHON, *sorted(glob.glob(f"{environment}/lib*/python3*/site-packages"))]
    with suppress(InterpreterError, Unavailable, ValueError):
        search, modules = _find_code()
        places += [p for p in (*search, *modules) if os.path.lexists(p)]
    return places


def _list_user_files(facts: HostFacts) -> list[str]:
    """Return the files that sbatch, srun and agents read as the user."""
    found = [facts.config_path]
    with suppress(Unavailable):
        found.append(plugin.find_plugstack(facts))
        if line := plugin.find_our_line(facts):
            found.append(line.path)
    return [p for p in found if os.path.lexists(p)]


def _find_barriers(place: str) -> Iterator[str]:
    """Yield the barriers of every directory and file below a package."""
    for path, info in walk_files(os.path.realpath(place)):
        if found := paths.find_barrier(path, info, look=True):
            yield found


def check_access(facts: HostFacts) -> Outcome:
    """Check every component of every path with the rights of a job's owner."""
    if not os.path.lexists(PYTHON) and facts.root:
        raise Unavailable(f"{PYTHON} does not exist (see install.parts)")
    barriers: list[str] = []
    code = list(dict.fromkeys(_list_code()))
    for path in (*code, *_list_user_files(facts)):
        try:
            barriers += paths.find_barriers(path)
        except PermissionError as exc:
            barriers.append(f"{exc.filename} cannot be reached as {paths.name_user(facts.uid)}")
        except OSError as exc:
            barriers.append(f"{exc.filename or path}: {exc.strerror}")
    if not barriers:
        barriers = [found for place in code[1:] if os.path.isdir(place) for found in _find_barriers(place)]
    if barriers:
        wanted = "interpreter, packages, plugin and settings that every owner of jobs can read and execute"
        barriers = list(dict.fromkeys(barriers))
        return report_wrong(f"agents and commands of users cannot run here: {join_some(barriers)}", wanted, FIX)
    return report_ok(f"everybody can use {PYTHON}, its packages, the plugin and {facts.config_path}")
