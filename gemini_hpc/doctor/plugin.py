"""Checks of the SPANK plugin; Slurm reports a plugin that does not load in a log at most, and goes on without it."""

from __future__ import annotations

import glob
import os
import shlex
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gemini_hpc.doctor.facts import HostFacts, SlurmRelease, read_text
from gemini_hpc.doctor.finding import Outcome, Unavailable, report_ok, report_warning, report_wrong

NAME = "gemini_spank.so"
DEFAULT_RUN_DIR = "/run/gemini-hpc"
_MAX_FILES = 64
SYMBOL = b"plugin_version"
_MAX_PLUGIN_BYTES = 64 << 20
_MAX_HEADERS = 4096
_MAX_SYMBOLS = 1 << 20
_DYNSYM = 11
_LOAD = 1


@dataclass(frozen=True, slots=True)
class PluginLine:
    """The plugin's line: its file, whether `required` or `optional`, its path and arguments."""

    file: str
    need: str
    path: str
    arguments: tuple[str, ...]


def find_plugstack(facts: HostFacts) -> str:
    """Return the plugstack.conf in effect on this host.

    The file is beside slurm.conf, or where nodes store the copy from slurmctld.
    """
    stated = facts.conf["PlugStackConfig"]
    fetched = "/run/slurm/conf/plugstack.conf"
    if stated and not os.path.exists(stated) and os.path.exists(fetched):
        return fetched
    return stated or os.path.join(os.path.dirname(facts.conf["SLURM_CONF"]), "plugstack.conf")


def read_lines(path: str, plugin_dirs: str, seen: set[str]) -> Iterator[PluginLine]:
    """Yield the plugins of a plugstack.conf and its includes. Raises OSError.

    The names of all files read are added to `seen`.
    """
    if path in seen or len(seen) >= _MAX_FILES:
        return
    seen.add(path)
    for line in read_text(path).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if len(words) < 2:
            continue
        need, file, *arguments = words
        if need == "include":
            for included in sorted(glob.glob(os.path.join(os.path.dirname(path), file))):
                yield from read_lines(included, plugin_dirs, seen)
        elif need in ("optional", "required"):
            places = [os.path.join(d, file) for d in plugin_dirs.split(":")] if not file.startswith("/") else [file]
            found = next((p for p in places if os.path.exists(p)), places[0])
            yield PluginLine(path, need, found, tuple(arguments))


def find_our_line(facts: HostFacts) -> PluginLine | None:
    """Return the plugin's line, None if there is none."""
    path = find_plugstack(facts)
    try:
        found = list(read_lines(path, facts.conf["PluginDir"], set()))
    except OSError as exc:
        raise Unavailable(f"{path}: {exc.strerror}") from None
    return next((line for line in found if os.path.basename(line.path) == NAME), None)


def _require_plugin(facts: HostFacts) -> PluginLine:
    line = find_our_line(facts)
    if line is None or not os.path.exists(line.path):
        raise Unavailable("no plugin (see plugin.line)")
    return line


def check_line(facts: HostFacts) -> Outcome:
    """Check that the plugin is configured, and installed."""
    path = find_plugstack(facts)
    wanted = f"`optional .../{NAME}` in {path}, and that file, on every host"
    fix = "make -C slurm install, and the line of slurm/plugstack.conf.example"
    if not os.path.exists(path):
        return report_wrong(f"{path} does not exist: no option --gemini-replicas, no protection", wanted, fix)
    found = find_our_line(facts)
    if found is None:
        return report_wrong(f"{path} does not name {NAME}: no option --gemini-replicas, no protection", wanted, fix)
    if not os.path.exists(found.path):
        return report_wrong(f"{found.path} does not exist: with `{found.need}` in {found.file}", wanted, fix)
    if found.need == "required":
        text = f"{found.file} has `required`: a plugin that does not load stops everybody's jobs"
        return report_warning(text, wanted, "write optional instead")
    return report_ok(f"{found.path}, optional in {found.file}")


def check_release(facts: HostFacts) -> Outcome:
    """Check the plugin's release: Slurm does not load one of another release, and jobs run without protection."""
    path = _require_plugin(facts).path
    wanted = f"a plugin built against the headers of Slurm {'{}.{:02}'.format(*facts.release.series)}"
    fix = "make -C slurm clean all install with the headers of the Slurm that is installed here"
    try:
        built = read_release(path)
    except ElfError as exc:
        return report_wrong(f"{path}: {exc}", wanted, fix)
    except OSError as exc:
        raise Unavailable(f"{path}: {exc.strerror}") from None
    if built.series != facts.release.series:
        found = f"{path} was built for Slurm {built}, this host has {facts.release}: Slurm silently does not load it"
        return report_wrong(found, wanted, fix)
    return report_ok(f"built for {built}, this host has {facts.release}")


def check_run_dir(facts: HostFacts) -> Outcome:
    """Check that the plugin searches for the map where the prolog puts it."""
    run_dirs = [a.partition("=")[2] for a in _require_plugin(facts).arguments if a.startswith("run_dir=")]
    found, wanted = (run_dirs[-1] if run_dirs else DEFAULT_RUN_DIR), facts.settings.run_dir
    strange = [a for a in _require_plugin(facts).arguments if not a.startswith("run_dir=")]
    if strange:
        text = f"the plugin refuses its argument {strange[0][:60]!r}"
        return report_wrong(text, "run_dir=DIR or nothing", f"correct the line in {find_plugstack(facts)}")
    if found.rstrip("/") != wanted.rstrip("/"):
        return report_wrong(
            f"the plugin looks in {found}, the agents are in {wanted}: tasks find no map, nothing is protected",
            "one run_dir",
            f"run_dir={wanted} behind the plugin in {find_plugstack(facts)}",
        )
    return report_ok(found)


class ElfError(ValueError):
    """The error that a file is not a readable plugin."""


def read_release(path: str) -> SlurmRelease:
    """Return the release that a plugin was built for, without loading it, which would run its code.

    Raises `ElfError` and OSError.
    """
    with open(path, "rb") as f:
        data = f.read(_MAX_PLUGIN_BYTES)
    try:
        return _find_release(data)
    except (struct.error, IndexError, OverflowError):
        raise ElfError("the file is cut short or damaged") from None


def _find_release(data: bytes) -> SlurmRelease:
    if data[:4] != b"\x7fELF" or data[4] not in (1, 2) or data[5] not in (1, 2):
        raise ElfError("not a shared object")
    if data[4] == 1:
        raise ElfError("a 32-bit object: Slurm's are 64-bit")
    order = "<" if data[5] == 1 else ">"

    def unpack(fmt: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(order + fmt, data, offset)

    phoff, shoff = unpack("QQ", 32)
    _, phentsize, phnum, shentsize, shnum = unpack("5H", 52)
    if max(phnum, shnum) > _MAX_HEADERS:
        raise ElfError("too many headers")
    sections = [unpack("IIQQQQIIQQ", shoff + i * shentsize) for i in range(shnum)]
    for section in sections:
        kind, offset, size, link, entry = section[1], section[4], section[5], section[6], section[9]
        if kind != _DYNSYM or entry < 24:
            continue
        names = sections[link][4]
        for i in range(min(size // entry, _MAX_SYMBOLS)):
            name, _, _, _, value, _ = unpack("IBBHQQ", offset + i * entry)
            if data[names + name : names + name + len(SYMBOL) + 1] == SYMBOL + b"\0":
                return _read_release_at(unpack, value, [phoff + k * phentsize for k in range(phnum)])
    raise ElfError("no plugin_version in the file: not a plugin of Slurm")


def _read_release_at(
    unpack: Callable[[str, int], tuple[int, ...]], address: int, headers: Iterable[int]
) -> SlurmRelease:
    for at in headers:
        kind, _, offset, start, _, size = unpack("IIQQQQ", at)
        if kind == _LOAD and start <= address < start + size:
            (number,) = unpack("I", offset + address - start)
            return SlurmRelease(number >> 16 & 0xFF, number >> 8 & 0xFF, number & 0xFF)
    raise ElfError("plugin_version is not in the file")
