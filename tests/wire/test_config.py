"""gemini.toml: every mistake is one line that names file and key."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.config import ConfigError, Settings, load_site_settings, parse_settings

KEYS = sorted(f.name for f in dataclasses.fields(Settings))


def refused(text: str, *words: str) -> None:
    line = refusal(ConfigError, parse_settings, text, "/x/gemini.toml")
    assert line.startswith("/x/gemini.toml: ") and "\n" not in line and len(line) < 1500, text[:80]
    for word in words:
        assert word in line, line


def test_defaults_are_valid() -> None:
    defaults = Settings()
    lines = []
    for f in dataclasses.fields(Settings):
        value = getattr(defaults, f.name)
        lines.append(f"{f.name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    assert parse_settings("\n".join(lines)) == defaults == parse_settings("")


def test_values_are_taken() -> None:
    settings = parse_settings(
        'heartbeat_s = 2\noperators = ["a", "b"]\nstrict_prolog = true\ncontroller_host = "ctl"'
    )
    assert (settings.heartbeat_s, settings.operators) == (2.0, ("a", "b"))
    assert settings.strict_prolog and settings.controller_host == "ctl"


def test_mistakes() -> None:
    for text, words in (
        ("heartbeat = 1.0", ("'heartbeat'", "did you mean heartbeat_s?")),
        ("zzz = 1", ("'zzz'", "known keys are", "retention_s")),
        ("[section]\nx = 1", ("'section'",)),
        ('heartbeat_s = "1"', ("heartbeat_s", "wanted a number", "'1'")),
        ("heartbeat_s = true", ("wanted a number", "True")),
        ("heartbeat_s = 0", ("heartbeat_s", "from 0.01 to 60", "found 0")),
        ("heartbeat_s = nan", ("heartbeat_s", "found nan")),
        ("retention_s = inf", ("retention_s", "found inf")),
        ("retention_s = -1", ("retention_s", ">= 0")),
        ("retention_s = 1" + "0" * 400, ("retention_s", "found inf")),
        ("controller_port = 0", ("controller_port", "from 1 to 65535")),
        ("controller_port = 65536", ("controller_port", "65536")),
        ("controller_port = 1" + "0" * 400, ("controller_port", "a number of 1329 bits")),
        ("controller_port = 1" + "0" * 5000, ("too many digits",)),
        ("controller_port = 7321.0", ("controller_port", "a whole number", "7321.0")),
        ("agent_port_base = 65000", ("agent_port_base + agent_port_count", "at most 65536", "69096")),
        ("memory_fraction = 1.5", ("memory_fraction", "from 0 to 1", "1.5")),
        ("strict_prolog = 1", ("strict_prolog", "true or false")),
        ('operators = "root"', ("operators", "a list of strings")),
        ("operators = [1]", ("operators", "a list of strings")),
        ('controller_host = "a\\nb"', ("controller_host", "printable")),
        (f"slurm_user = {['x' * 5000]}", ("slurm_user", "a string")),
        ("not toml", ("not valid TOML",)),
        ("x = " + "[" * 5000, ("TOML",)),
        ("a." * 5000 + "a = 1", ("",)),
        ("heartbeat_s = 1\nheartbeat_s = 2", ("not valid TOML",)),
        ('"\\u0000" = 1', ("unknown key",)),
    ):
        refused(text, *words)


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    try:
        parse_settings(text, "/x/gemini.toml")
    except ConfigError as exc:
        assert "\n" not in str(exc)


_values = (
    st.integers() | st.floats() | st.booleans() | st.text(max_size=30) | st.lists(st.text(max_size=5), max_size=3)
)


@given(st.sampled_from(KEYS), _values)
def test_any_value(key: str, value: object) -> None:
    text = repr(value) if isinstance(value, float) else json.dumps(value)
    try:
        settings = parse_settings(f"{key} = {text}", "/x/gemini.toml")
    except ConfigError as exc:
        assert key in str(exc) or "TOML" in str(exc)
        assert "\n" not in str(exc)
    else:
        found, default = getattr(settings, key), getattr(Settings(), key)
        assert type(found) is type(default) or (key == "rdma" and isinstance(found, tuple))


@pytest.mark.timeout(10)
def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: no such file"):
        load_site_settings(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load_site_settings(str(tmp_path))
    assert load_site_settings("/dev/null") == Settings()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_site_settings(str(tmp_path / "pipe"))
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + "ä".encode())
    with pytest.raises(ConfigError, match="longer than 1 MiB"):
        load_site_settings(str(tmp_path / "large"))
    path = tmp_path / "gemini.toml"
    path.write_bytes(b"controller_host = '\xff\xfe'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_site_settings(str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"off"', "off"),
        ('"auto"', "auto"),
        ('["mlx5_0:1"]', ("mlx5_0:1",)),
        ('["mlx5_0", "rxe_eth0:2"]', ("mlx5_0", "rxe_eth0:2")),
    ],
)
def test_rdma(text: str, value: str | tuple[str, ...]) -> None:
    assert parse_settings(f"rdma = {text}").rdma == value


@pytest.mark.parametrize(
    "text", ['"on"', '""', "true", "[]", "[1]", '["../x"]', '["mlx5_0:"]', '["mlx5_0:0"]', '["mlx5_0:256"]', '[""]']
)
def test_devices_for_rdma_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="rdma: wanted"):
        parse_settings(f"rdma = {text}")
