"""The pages on defects, faults and attacks name tests that are there, and commits that can be looked up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from .test_links import ROOT, section, spans

PAGES = ("docs/dev/robustness.md", "docs/faults.md")
REFERENCE = re.compile(r"(tests/[\w/.-]+)(?:::(\w+))?")
HASH = re.compile(r"[0-9a-f]{7,40}")
NONE = ("no test", "none")
# Sections that are no lists of defects, faults or attacks.
PROSE = (
    "How ",
    "What this list shows",
    "Who is against whom",
    "Boundaries",
    "Bounds on",
    "Without MUNGE",
    "What is not defended",
)
# The commits that fixed a defect, and in brackets the releases of Slurm that showed it.
FIX = re.compile(r"`[^`]+`(?:, `[^`]+`)*(?: \(clusters? \(.+\)\))?\.")


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


def items(text: str) -> Iterator[tuple[int, str]]:
    """Yield each item of the lists below the first heading, as its depth and its words in one line."""
    depth, words = 0, ""
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        for line in [] if part.startswith(PROSE) else [*part.splitlines()[1:], ""]:
            begins = re.match(r" *- ", line)
            if words and (begins or not line.strip()):
                yield depth, words
                words = ""
            if begins:
                depth, words = begins.end(), line[begins.end() :]
            elif words:
                words += f" {line.strip()}"


def entries(text: str) -> list[dict[str, str]]:
    """Return the entries of a page by their labels (`- words *Label*: words`); "" is what stands before the first.

    Each item is an entry, but for one that has items below itself and is bold as a whole: it is their heading.
    """
    found = list(items(text))
    below = [depth for depth, _ in found[1:]] + [0]
    split = [(depth, re.split(r"\*([A-Z][a-z ]+)\*: ", words)) for depth, words in found]
    return [
        dict(zip(["", *words[1::2]], (word.strip() for word in words[::2]), strict=True))
        for (depth, words), after in zip(split, below, strict=True)
        if after <= depth or not re.fullmatch(r"\*\*[^*]+\*\*", words[0])
    ]


def rows(page: str) -> list[dict[str, str]]:
    return entries((ROOT / page).read_text())


def in_code(cell: str) -> list[str]:
    """What a cell has in backticks."""
    found: list[str] = re.findall(r"`([^`]+)`", cell)
    return found


def test_every_reference_leads_to_a_test() -> None:
    for page in PAGES:
        named = [span for span in spans((ROOT / page).read_text()) if span.startswith("tests/")]
        assert sum("::" in span for span in named) > 30, page
        assert [wrong for span in named if (wrong := wrong_with(span))] == [], page


def wrong_entries(found: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the entries that neither name a test nor say that there is none, or do both."""
    named = [[span for span in in_code(row.get("Test", "")) if "::" in span] for row in found]
    return [row for row, tests in zip(found, named, strict=True) if bool(tests) == is_without(row)]


def is_without(row: dict[str, str]) -> bool:
    return row.get("Test", "").startswith(NONE)


def test_every_entry_names_a_test_or_says_that_there_is_none() -> None:
    for page in PAGES:
        found = rows(page)
        assert len(found) >= 100, page
        assert wrong_entries(found) == [], page


def test_an_entry_without_a_test_is_noticed() -> None:
    page = "# Page\n\n- [A](#a)\n\n## A\n\n- **Fault**: a,\n  b. *Limit*: x. *Test*: {}\n- **Next**{}\n"
    good = " *Test*: `tests/sim/test_site.py::test_x`."
    assert len(entries(page.format(good.removeprefix(" *Test*: "), good))) == 2
    for first, second, wrong in (
        ("`tests/sim/test_site.py::test_x`", good, 0),
        ("no test", good, 0),
        ("no test, see `tests/sim/test_site.py::test_x`", good, 1),
        ("`test_x`", good, 1),
        ("", good, 1),
        ("no test", ": seen.", 1),
        ("no test", ": seen.\n  - **Below**: seen.", 2),
        ("no test", f"\n  - **Below**: seen.{good}", 0),
    ):
        assert len(wrong_entries(entries(page.format(first, second)))) == wrong, (first, second)


def test_every_attack_names_a_test_that_is_there() -> None:
    files = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    known = {name for file in files for name in (file, file.rpartition("/")[2], *defined(f"tests/{file}"))}
    found = rows("docs/security.md")
    assert len(found) > 60
    for row in found:
        named = [span.rpartition("::")[2] for span in in_code(row.get("Test", ""))]
        named = [span for span in named if not (ROOT / "tests" / span).is_dir() and "*" not in span]
        assert row.keys() == {"", "Outcome", "Test"} and set(named) <= known, row
        assert in_code(row["Test"]), row


def test_commits_look_like_hashes() -> None:
    for row in rows("docs/dev/robustness.md"):
        assert FIX.fullmatch(row["Fix"]), row
        assert all(HASH.fullmatch(commit) for commit in in_code(row["Fix"])), row


def test_what_simulated_clusters_have_found_has_a_seed() -> None:
    found = entries("## A\n" + section("docs/dev/robustness.md", "Found by simulated clusters"))
    assert len(found) > 15 and all(row["Seed"].rstrip(".").isdecimal() for row in found)


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
