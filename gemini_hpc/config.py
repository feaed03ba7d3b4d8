"""Reading the site's settings, `/etc/gemini-hpc/gemini.toml`; unknown keys are errors."""

from __future__ import annotations

import os
from typing import Any, get_args

import msgspec

from gemini_hpc.settings import UNBOUNDED, ConfigError, Settings

__all__ = ["CONFIG_PATH", "ConfigError", "Settings", "load", "parse"]

CONFIG_PATH = "/etc/gemini-hpc/gemini.toml"

_WANTED = {str: "a string", bool: "true or false", tuple[str, ...]: "a list of strings"}


def _wanted(setting: Any) -> str:
    """A setting's type, for a message."""
    kind, about = get_args(setting)
    if get_args(kind) and kind not in _WANTED:
        return f"one of {', '.join(get_args(kind))}"
    if kind in _WANTED:
        return _WANTED[kind]
    limits = f">= {about.ge:g}" if about.le == UNBOUNDED else f"from {about.ge:g} to {about.le:g}"
    return f"a {'whole ' if kind is int else ''}number {limits}"


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _value(key: str, setting: Any, found: Any) -> Any:
    try:
        value = msgspec.convert(found, setting)
    except msgspec.ValidationError:
        raise ConfigError(f"{key}: wanted {_wanted(setting)}, found {_shown(found)}") from None
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{key}: wanted printable text, found {_shown(value)}")
    return value


def parse(text: str, where: str = CONFIG_PATH) -> Settings:
    """Settings from TOML text. Raises `ConfigError` on bad syntax, unknown keys and wrong types."""
    import tomllib
    from difflib import get_close_matches

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{where}: not valid TOML: {str(exc)[:200]}") from None
    except (RecursionError, ValueError):  # nested without end, or a number of thousands of digits
        raise ConfigError(f"{where}: not TOML that can be settings") from None
    known = {f.name: f.type for f in msgspec.structs.fields(Settings)}
    values: dict[str, Any] = {}
    for key, found in table.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            instead = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key[:80]!r}; {instead}")
        try:
            values[key] = _value(key, known[key], found)
        except ConfigError as exc:
            raise ConfigError(f"{where}: {exc}") from None
    settings = Settings(**values)
    if settings.agent_port_base + settings.agent_port_count > 65536:
        raise ConfigError(
            f"{where}: agent_port_base + agent_port_count: wanted at most 65536, found "
            f"{settings.agent_port_base + settings.agent_port_count}"
        )
    return settings


def load(path: str = CONFIG_PATH) -> Settings:
    """Settings of this host; the defaults where there is none of the usual name. Raises `ConfigError`, also for
    another file that is not there: somebody has named it, and means it."""
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read(1 << 20)
    except FileNotFoundError:
        if path != CONFIG_PATH:
            raise ConfigError(f"{path}: no such file; leave --config out for {CONFIG_PATH} or the defaults") from None
        return Settings()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid TOML: it is not UTF-8 text") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {os.strerror(exc.errno or 0)}") from None
    return parse(text, path)
