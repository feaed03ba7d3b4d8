"""The site's key in place of MUNGE's, by `doctor`: no cluster is needed."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.doctor import examine, installation, munge
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.wire import keyed, site_key

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it reads the site's key")


class Keyed(HostFacts):
    """A host of a site without MUNGE."""

    settings = Settings(auth="key", slurm_user=pwd.getpwuid(os.geteuid()).pw_name)

    def __init__(self) -> None:
        super().__init__("/nonexistent/gemini.toml", "node")


def test_the_key_is_examined_in_munges_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "etc" / "auth.key"
    key = keyed.make_key(str(path))
    monkeypatch.setattr(site_key, "KEY_PATH", str(path))
    monkeypatch.setattr(installation, "_has_munge", lambda: pytest.fail("MUNGE is looked for"))
    only = ["munge.answers", "munge.version", "munge.key", "auth.key", "install.parts"]
    found = {f.check: f for f in examine.examine(Keyed(), only)}
    assert {found[f"munge.{name}"].status for name in ("answers", "version", "key")} == {"skipped"}
    assert found["auth.key"].status == "ok" and keyed.fingerprint(key) in found["auth.key"].found
    assert key.hex() not in repr(found)
    path.chmod(0o644)
    outcome = munge.check_site_key(Keyed())
    assert outcome.status == "wrong" and "found 0644" in outcome.found
