"""`make tags`: set a git tag for each row of CHANGELOG.md's table of releases. Nothing is pushed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| (\d+\.\d+\.\d+) \| ([0-9a-f]{40}) \|$", re.M)


class TagError(Exception):
    """A table that does not fit the repository, in a sentence."""


def releases(changelog: str) -> dict[str, str]:
    """Return the commit of each release in the table."""
    rows: list[tuple[str, str]] = _ROW.findall(changelog)
    return dict(rows)


def set_tags(repository: Path) -> list[str]:
    """Set the annotated tags that are missing, and return a line for each release.

    Raises TagError, before any tag is set: a commit that HEAD does not contain or that has another version in
    pyproject.toml, and a tag that exists elsewhere.
    """
    wanted = releases((repository / "CHANGELOG.md").read_text())
    if not wanted:
        raise TagError("CHANGELOG.md has no table of releases: rows of `| 1.2.3 | 40 digits of a commit |`")
    there = {version: _checked(repository, version, commit) for version, commit in wanted.items()}
    for version, is_there in there.items():
        if not is_there:
            _git(repository, "tag", "-a", "-m", f"gemini-hpc {version}", f"v{version}", wanted[version])
    return [f"v{v} {wanted[v][:7]} {'was there' if is_there else 'set'}" for v, is_there in there.items()]


def _checked(repository: Path, version: str, commit: str) -> bool:
    """Return whether the tag exists at the right commit."""
    if _found(repository, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        raise TagError(f"{version}: HEAD does not contain {commit}; a shallow clone needs `git fetch --unshallow`")
    has = tomllib.loads(_git(repository, "show", f"{commit}:pyproject.toml"))["project"]["version"]
    if has != version:
        raise TagError(f"{version}: pyproject.toml of {commit} says {has}")
    tagged = _found(repository, "rev-parse", "--verify", "--quiet", f"refs/tags/v{version}^{{commit}}")
    if tagged not in (None, commit):
        raise TagError(f"v{version} exists at {tagged}, and CHANGELOG.md says {commit}: one of the two is wrong")
    return tagged is not None


def _git(repository: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TagError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _found(repository: Path, *words: str) -> str | None:
    """The output of a question to git; None if its answer is no."""
    try:
        return _git(repository, *words)
    except TagError:
        return None


def main() -> int:
    try:
        print(*set_tags(ROOT), sep="\n")
    except TagError as exc:
        print(f"make tags: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
