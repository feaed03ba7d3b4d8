"""`make tags` sets what CHANGELOG.md's table says, once, and nothing where a tag is elsewhere."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from .tags import ROOT, TagError, releases, set_tags


class Repository:
    """A repository with a commit for each version, whose CHANGELOG.md is not committed."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
        monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_NAME", "somebody")
            monkeypatch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
        self.git("init", "-q")

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", "-C", str(self.path), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, version: str) -> str:
        (self.path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
        self.git("add", "pyproject.toml")
        self.git("commit", "-q", "-m", version)
        return self.git("rev-parse", "HEAD")

    def table(self, **commits: str) -> None:
        rows = "".join(f"| {name[1:].replace('_', '.')} | {commit} |\n" for name, commit in commits.items())
        (self.path / "CHANGELOG.md").write_text(f"# Changelog\n\n| release | commit |\n|---|---|\n{rows}")

    def tags(self) -> dict[str, str]:
        return {tag: self.git("rev-parse", f"{tag}^{{commit}}") for tag in self.git("tag").split()}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path, monkeypatch)


def test_tags_are_set_once(repository: Repository) -> None:
    first, second = repository.commit("0.1.0"), repository.commit("0.2.0")
    repository.table(v0_1_0=first)
    assert set_tags(repository.path) == [f"v0.1.0 {first[:7]} set"]
    repository.table(v0_2_0=second, v0_1_0=first)
    assert set_tags(repository.path) == [f"v0.2.0 {second[:7]} set", f"v0.1.0 {first[:7]} was there"]
    objects = repository.git("rev-parse", "v0.1.0", "v0.2.0")
    assert set_tags(repository.path) == [f"v0.2.0 {second[:7]} was there", f"v0.1.0 {first[:7]} was there"]
    assert repository.tags() == {"v0.1.0": first, "v0.2.0": second}
    assert repository.git("rev-parse", "v0.1.0", "v0.2.0") == objects
    assert repository.git("cat-file", "-t", "v0.1.0") == "tag", "annotated"


def test_nothing_is_set_where_the_table_does_not_fit(repository: Repository) -> None:
    first, second = repository.commit("0.1.0"), repository.commit("0.2.0")
    repository.git("tag", "v0.2.0", first)
    repository.table(v0_1_0=first, v0_2_0=second)
    with pytest.raises(TagError, match="exists at"):
        set_tags(repository.path)
    assert repository.tags() == {"v0.2.0": first}, "a tag that exists elsewhere is left, and no other is set"
    repository.git("tag", "-d", "v0.2.0")
    repository.git("branch", "aside")
    repository.git("reset", "-q", "--hard", first)
    for table, why in (
        ({"v0_1_0": first, "v0_2_0": second}, "HEAD does not contain"),
        ({"v0_1_0": first, "v0_2_0": "0" * 40}, "HEAD does not contain"),
        ({"v0_2_0": first}, "says 0.1.0"),
        ({}, "no table"),
    ):
        repository.table(**table)
        with pytest.raises(TagError, match=why):
            set_tags(repository.path)
        assert repository.tags() == {}, why


def test_each_release_of_the_changelog_has_its_commit() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = [line.split()[1] for line in text.splitlines() if line.startswith("## ")]
    assert sections[0] == "Unreleased"
    # The newest one's commit cannot name itself: its row comes with the next commit.
    assert list(releases(text)) in (sections[1:], sections[2:])
    assert sections[1] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
