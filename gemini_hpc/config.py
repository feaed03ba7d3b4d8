"""Reader of the site's settings in `/etc/gemini-hpc/gemini.toml`; unknown keys are errors.

Only the standard library is used, because root's prolog and epilog read the settings.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import fields
from typing import Any

from gemini_hpc.files import read_regular_file
from gemini_hpc.paths import find_weaknesses
from gemini_hpc.settings import (
    AUTHS,
    CANARY,
    MODES,
    RDMA_AUTO,
    RDMA_OFF,
    SLURM_APIS,
    UNBOUNDED,
    ConfigError,
    Settings,
)

__all__ = [
    "CONFIG_PATH",
    "ConfigError",
    "Settings",
    "build_own_settings",
    "find_program_problem",
    "load_site_settings",
    "parse_settings",
]

CONFIG_PATH = "/etc/gemini-hpc/gemini.toml"
_MAX_BYTES = 1 << 20

_KINDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of strings",
}


def _find_rdma_problem(rdma: str | tuple[str, ...]) -> str:
    def is_device(name: str) -> bool:
        device, _, port = name.partition(":")
        good_port = port.isascii() and port.isdecimal() and 0 < int(port[:4]) < 256 if ":" in name else True
        return device.replace("_", "").isascii() and device.replace("_", "").isalnum() and good_port

    if rdma in (RDMA_OFF, RDMA_AUTO) or (isinstance(rdma, tuple) and rdma and all(map(is_device, rdma))):
        return ""
    shown = list(rdma) if isinstance(rdma, tuple) else rdma
    return f'rdma: wanted "off", "auto", or devices such as ["mlx5_0:1"], found {_format_value(shown)}'


def _convert(key: str, want: Any, value: Any, least: float, most: float) -> Any:
    wanted = type(want)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= most else math.inf
    if (wanted is tuple or key == "rdma") and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if type(value) is not wanted:
        raise ConfigError(f"{key}: wanted {_KINDS[wanted]}, found {_format_value(value)}")
    if wanted in (int, float) and not least <= value <= most:
        limits = f"from {least:g} to {most:g}" if most < UNBOUNDED else f">= {least:g}"
        raise ConfigError(f"{key}: wanted a number {limits}, found {_format_value(value)}")
    if wanted is str and not value.isprintable():
        raise ConfigError(f"{key}: wanted printable text, found {_format_value(value)}")
    return value


def find_program_problem(path: str) -> str:
    """Return why this process must not run a program that the settings name, "" if it may.

    Only root and this process's user may be able to write the file, or to replace it by another.
    """
    if not path.startswith("/"):
        return "wanted an absolute path"
    try:
        info, weak = os.stat(path), find_weaknesses(path, frozenset((0, os.geteuid())), sticky=True)
    except OSError as exc:
        return f"{exc.strerror}"
    if not stat.S_ISREG(info.st_mode) or not os.access(path, os.X_OK):
        return "wanted a file that this user may execute"
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        return "wanted a file of root or of this user that nobody else can write"
    return f"somebody else could put another file in its place: {weak[0]}" if weak else ""


def _find_metrics_file_problem(path: str) -> str:
    if not path or (path.startswith("/") and path.endswith(".prom")):
        return ""
    return f"metrics_file: wanted an absolute path that ends with .prom, found {_format_value(path)}"


def _find_metrics_listen_problem(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not address or (host and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        return ""
    return f"metrics_listen: wanted an address and a port, such as 127.0.0.1:9417, found {_format_value(address)}"


def _find_mode_problem(mode: str, partitions: tuple[str, ...]) -> str:
    if mode not in MODES:
        return f"mode: wanted one of {', '.join(MODES)}, found {_format_value(mode)}"
    if mode == CANARY and not partitions:
        return 'canary_partitions: wanted at least one partition with mode = "canary", found none'
    if mode != CANARY and partitions:
        return f'canary_partitions: wanted none with mode = "{mode}", found {_format_value(list(partitions))}'
    return ""


def _format_value(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_settings(text: str, where: str = CONFIG_PATH) -> Settings:
    """Return the settings in TOML text. Raises `ConfigError` on bad syntax, unknown keys and wrong types."""
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{where}: not valid TOML: {str(exc)[:200]}") from None
    except (RecursionError, ValueError):  # nested without end, or a number of thousands of digits
        raise ConfigError(f"{where}: this TOML is nested too deeply, or has a number of too many digits") from None
    known = {f.name: f for f in fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            from difflib import get_close_matches

            near = get_close_matches(key, known, 1)
            instead = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key[:80]!r}; {instead}")
        field_, limits = known[key], known[key].metadata
        try:
            values[key] = _convert(key, field_.default, value, limits["least"], limits["most"])
        except ConfigError as exc:
            raise ConfigError(f"{where}: {exc}") from None
    settings = Settings(**values)
    if settings.slurm_api not in SLURM_APIS:
        names = ", ".join(SLURM_APIS)
        raise ConfigError(f"{where}: slurm_api: wanted one of {names}, found {_format_value(settings.slurm_api)}")
    if settings.auth not in AUTHS:
        names = " or ".join(AUTHS)
        raise ConfigError(f"{where}: auth: wanted {names}, found {_format_value(settings.auth)}")
    for problem in (
        _find_metrics_file_problem(settings.metrics_file),
        _find_metrics_listen_problem(settings.metrics_listen),
        _find_rdma_problem(settings.rdma),
        _find_mode_problem(settings.mode, settings.canary_partitions),
    ):
        if problem:
            raise ConfigError(f"{where}: {problem}")
    if settings.agent_port_base + settings.agent_port_count > 65536:
        raise ConfigError(
            f"{where}: agent_port_base + agent_port_count: wanted at most 65536, found "
            f"{settings.agent_port_base + settings.agent_port_count}"
        )
    return settings


def build_own_settings() -> Settings:
    """Return the settings of agents that a job has started itself, without its site.

    Nobody waits for them after the job's end: they end as soon as the tier has their last version. The whole memory
    counts as theirs because `run` grants each a share of its job's.
    """
    return Settings(
        auth="key",
        agent_cgroup="none",
        memory_fraction=1.0,
        retention_s=0.0,
        held_retention_s=0.0,
        attach_timeout_s=40.0,  # the step's tasks start one after another on hundreds of nodes
    )


def load_site_settings(path: str = CONFIG_PATH) -> Settings:
    """Return the settings of this host, the defaults for /dev/null or if the usual file does not exist.

    Raises `ConfigError`, also if another file does not exist, because its name was given on purpose.
    """
    try:
        data = b"" if path == os.devnull else read_regular_file(path, _MAX_BYTES + 1)
    except FileNotFoundError:
        if path != CONFIG_PATH:
            raise ConfigError(f"{path}: no such file; leave --config out for {CONFIG_PATH} or the defaults") from None
        return Settings()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: longer than {_MAX_BYTES >> 20} MiB")
    try:
        return parse_settings(data.decode(), path)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid TOML: it is not UTF-8 text") from None
