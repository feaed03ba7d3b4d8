"""The cluster's gemini.toml, and its key without MUNGE."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping

from gemini_hpc.devcluster import cgroups
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.layout import ClusterFiles
from gemini_hpc.devcluster.network import CONTROLLER
from gemini_hpc.devcluster.profiles import Profile, Setting
from gemini_hpc.wire import keyed


def write(layout: ClusterFiles, profile: Profile, overrides: Mapping[str, Setting]) -> None:
    """Write the keys that every cluster needs, then the profile's, then those given to `bring_up`."""
    values: dict[str, Setting] = {
        "controller_host": CONTROLLER,
        "slurm_user": "slurm",
        "cluster_name": layout.name,
        "state_dir": str(layout.controller),
        # Nodes without their own hierarchy must not create cgroups in the machine's.
        **({} if cgroups.are_possible() else {"agent_cgroup": "none"}),
        **profile.gemini,
        **overrides,
    }
    lines = [f"{key} = {_format_toml(key, value)}\n" for key, value in values.items()]
    (layout.settings / "gemini.toml").write_text("".join(lines))
    if values.get("auth") == "key":
        path = layout.settings / "auth.key"
        keyed.make_key(str(path))
        os.chown(path, pwd.getpwnam("slurm").pw_uid, 0)  # the controller is started as this user


def _format_toml(key: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_toml(key, item) for item in value)}]"
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)
    raise DevclusterError(
        f"setting {key} = {value!r}: only strings, numbers, booleans and lists of them are possible"
    )
