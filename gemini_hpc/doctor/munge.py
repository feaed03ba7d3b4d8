"""Checks of MUNGE, or of the key in its place, with which every connection begins."""

from __future__ import annotations

import os
import re
import stat
import subprocess

from gemini_hpc import clock, paths
from gemini_hpc.doctor import network
from gemini_hpc.doctor.facts import HostFacts, run_program
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong
from gemini_hpc.wire import keyed, munge, site_key

SAFE_VERSION = (0, 5, 18)
DEFAULT_KEY = "/etc/munge/munge.key"
_PROGRAMS = ("/usr/sbin/munged", "/usr/local/sbin/munged", "/usr/bin/munge", "/usr/local/bin/munge")
_TIMEOUT_S = 5.0  # a program that only prints its version
# Credentials have whole seconds, and transfer takes time: below this value no judgement is possible.
CLOCK_WARNING_S, CLOCK_WRONG_S = 5.0, 30.0


def _require_munge(facts: HostFacts) -> None:
    if facts.settings.auth != "munge":
        raise Unavailable(f'not used: auth is "{facts.settings.auth}"')


def check_answers(facts: HostFacts) -> Outcome:
    """Check MUNGE with a credential to oneself."""
    _require_munge(facts)
    nonce = os.urandom(16)
    fix = "start munged; its socket is /run/munge/munge.socket.2 unless libmunge was built otherwise"
    try:
        payload, uid, _ = munge.decode(munge.encode(nonce, for_uid=facts.uid))
    except munge.MungeError as exc:
        if "libmunge" in str(exc):
            fix = "install MUNGE's library (Debian: libmunge2; others: munge-libs) and munged"
        return report_wrong(f"MUNGE: {exc}", "a munged that makes and opens credentials", fix)
    if payload != nonce or uid != facts.uid:
        return report_wrong(f"a credential of uid {facts.uid} came back as uid {uid}'s", "itself", "see munged's log")
    return report_ok("munged made and opened a test credential")


def judge_version(text: str) -> Outcome:
    """Judge the release in the program's own output."""
    found = re.search(r"munge-([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", text)
    if not found:
        raise Unavailable(f"cannot find MUNGE's release in {text.strip()[:60]!r}")
    version = tuple(int(n) for n in found.groups())
    if version < SAFE_VERSION:
        return report_warning(
            f"MUNGE {found[0][6:]}: a local user may get at the key (CVE-2026-25506)",
            "0.5.18 or later, or a distribution's package with that fix",
            "upgrade MUNGE on all hosts, then distribute a new key",
        )
    return report_ok(f"MUNGE {found[0][6:]}")


def check_version(facts: HostFacts) -> Outcome:
    """Check MUNGE's release for a known leak of the key; its holder can impersonate anybody on the cluster."""
    _require_munge(facts)
    program = next((p for p in _PROGRAMS if os.access(p, os.X_OK)), None)
    if program is None:
        raise Unavailable(f"none of {', '.join(_PROGRAMS)} is here")
    if facts.root and paths.find_weaknesses(program):
        raise Unavailable(f"{program} is not run as root, others can change it")
    try:
        return judge_version(run_program([program, "--version"], _TIMEOUT_S).stdout)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Unavailable(f"{program}: {exc}") from None


def judge_clock(ahead_s: float, where: str) -> Outcome:
    """Judge how many seconds the clock of `where` is ahead of ours."""
    text = f"the clock of {where} is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    wanted = f"less than {CLOCK_WARNING_S:.0f} s (credentials are good for {munge.TTL_S} s)"
    if abs(ahead_s) >= CLOCK_WRONG_S:
        return report_wrong(text, wanted, "an NTP client on both hosts")
    if abs(ahead_s) >= CLOCK_WARNING_S:
        return report_warning(text, wanted, "an NTP client on both hosts")
    return report_ok(f"the clock of {where} agrees with this host's (within {CLOCK_WARNING_S:.0f} s)")


def check_clock(facts: HostFacts) -> Outcome:
    """Compare our clock with the controller's, by the time in its credential."""
    try:
        made = network.greet(facts.settings, facts.slurm_uid)
    except network.GreetingError as exc:
        raise Unavailable(f"cannot ask the controller for its time: {exc}") from None
    return judge_clock(made - clock.time(), facts.settings.controller_host)


def _find_key(facts: HostFacts) -> tuple[str, int]:
    """Return the key's path, and the uid that munged runs as."""
    for process in facts.processes:
        if process.name == "munged":
            key_files = [a.partition(b"=")[2] for a in process.arguments if a.startswith(b"--key-file=")]
            return (os.fsdecode(key_files[-1]) if key_files else DEFAULT_KEY), process.uid
    if not os.path.exists(DEFAULT_KEY):
        raise Unavailable("no munged is visible on this host")
    return DEFAULT_KEY, os.stat(DEFAULT_KEY).st_uid


def check_key(facts: HostFacts) -> Outcome:
    """Check the key's mode, since any reader of the key can impersonate anybody on the cluster."""
    _require_munge(facts)
    facts.require_root("the key's mode")
    path, owner = _find_key(facts)
    wanted = f"{path}: munged's own, mode 0400 or 0600, in directories that nobody else can write to"
    try:
        info = os.stat(path)
        weak = paths.find_weaknesses(path, frozenset((0, owner)))
    except OSError as exc:
        raise Unavailable(f"{path}: {exc.strerror}") from None
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o077 or weak:
        found = join_some([*weak, *([f"{path} has mode {mode:04o}"] if mode & 0o077 else [])])
        return report_wrong(
            found, wanted, f"chmod 0400 {path}; if users could read the key, distribute a new one to all hosts"
        )
    return report_ok(f"{path}, {paths.name_user(info.st_uid)}, {mode:04o}")


def check_site_key(facts: HostFacts) -> Outcome:
    """Check the site's key file in place of MUNGE, since any reader of the key can impersonate anybody."""
    if facts.settings.auth != "key":
        raise Unavailable(f'not used: auth is "{facts.settings.auth}"')
    facts.require_root("the site's key")
    wanted = f"{site_key.KEY_PATH}: {keyed.KEY_BYTES} bytes, root's or SlurmUser's, mode 0600, the same on all hosts"
    try:
        key_check = keyed.fingerprint(site_key.read(facts.settings))
    except keyed.KeyFileError as exc:
        return report_wrong(str(exc), wanted, "docs/admin.md, Without MUNGE")
    return report_ok(f"{site_key.KEY_PATH}, fingerprint {key_check}: compare it between hosts")
