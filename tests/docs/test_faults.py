"""The pages on defects and faults name tests that are there, and commits in a form that can be looked up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from .test_links import ROOT, section, spans

PAGES = ("docs/dev/robustness.md", "docs/faults.md")
REFERENCE = re.compile(r"(tests/[\w/.-]+)(?:::(\w+))?")
HASH = re.compile(r"[0-9a-f]{7,40}")
NONE = "no test"
# Days of the month, and the commit.
SINCE = re.compile(r"\d{1,2}, `([^`]+)`")
FOUND_BY = ("not recorded", "review", "model", "simulation", "cluster", "user")


@cache
def defined(path: str) -> frozenset[str]:
    """Names of the tests of a file."""
    body = ast.parse((ROOT / path).read_text()).body
    found = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in found if name.startswith("test_"))


def wrong_with(span: str) -> str:
    """Why this reference leads nowhere; "" if it leads to a test, or to a file or folder of tests."""
    found = REFERENCE.fullmatch(span)
    if found is None:
        return f"{span} is no reference"
    path, name = found[1], found[2]
    if not (ROOT / path).exists():
        return f"there is no {path}"
    if name and name not in defined(path):
        return f"{path} has no {name}"
    return ""


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """The rows of each table, by the names of its columns."""
    for found in re.finditer(r"^\|.+\|\n\|[-|]+\|\n(?:\|.+\|\n)*", text, re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
        yield [dict(zip(head, row, strict=True)) for row in rows]


def rows(page: str) -> list[dict[str, str]]:
    return [row for table in tables((ROOT / page).read_text()) for row in table]


def in_code(cell: str) -> list[str]:
    """What a cell has in backticks."""
    found: list[str] = re.findall(r"`([^`]+)`", cell)
    return found


def test_every_reference_leads_to_a_test() -> None:
    for page in PAGES:
        named = [span for span in spans((ROOT / page).read_text()) if span.startswith("tests/")]
        assert sum("::" in span for span in named) > 30, page
        assert [wrong for span in named if (wrong := wrong_with(span))] == [], page


def test_every_row_names_a_test_or_says_that_there_is_none() -> None:
    for page in PAGES:
        found = rows(page)
        assert len(found) >= 40, page
        for row in found:
            named = [span for span in in_code(row["test"]) if "::" in span]
            assert bool(named) != row["test"].startswith(NONE), (page, row)


def test_commits_look_like_hashes() -> None:
    for row in rows("docs/dev/robustness.md"):
        mended, since = in_code(row["mended by"]), SINCE.fullmatch(row["since"])
        assert mended and since is not None, row
        assert all(HASH.fullmatch(commit) for commit in (*mended, since[1])), row
        assert row["found by"].startswith(FOUND_BY), row


def test_what_simulated_clusters_have_found_has_a_seed() -> None:
    found = list(tables(section("docs/dev/robustness.md", "Found by simulated clusters") + "\n"))
    assert len(found) == 2 and all(row["seed"].isdecimal() for table in found for row in table)


def test_wrong_references_are_noticed() -> None:
    for span, wrong in (
        ("tests/docs/test_faults.py::test_commits_look_like_hashes", ""),
        ("tests/sim", ""),
        ("tests/docs/test_faults.py::test_that_is_not_there", "has no"),
        ("tests/docs/test_faults.py::wrong_with", "has no"),
        ("tests/docs/test_nowhere.py::test_x", "there is no"),
        ("tests/docs/test_faults.py::test_x[1]", "no reference"),
    ):
        found = wrong_with(span)
        assert wrong in found if wrong else not found, span
