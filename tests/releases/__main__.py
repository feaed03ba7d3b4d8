"""`python -m tests.releases RELEASE [-- CMD...]`: make the root of a release, run a command in it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import root, run
from .errors import ReleaseError

_TOP = Path(__file__).resolve().parents[2]
_DESCRIPTION = """\
Runs this project on another release of Slurm than this machine's. The release comes with a Debian of its own, a root
that debootstrap makes once (a few minutes, 600 MB) below --cache. CMD runs there as root, in namespaces of its
own, in a copy of the checkout that is installed for it (/srv/gemini-hpc, with a .venv). What it changes is kept in
memory and gone at the end, but for directories that --bind shows. Several runs may go at once, in one root, too.
"""
_EXAMPLES = """\
examples:
  make test-slurm RELEASE=24.11
  python -m tests.releases 24.11 -- bash
  python -m tests.releases 26.05 -- .venv/bin/gemini-hpc demo
  python -m tests.releases 26.05 -- .venv/bin/python -m pytest -q tests/controller/test_give_back.py
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.releases",
        usage="%(prog)s RELEASE [options] [-- CMD...]   (without CMD the root is only made)",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", choices=root.SUITES, help="Slurm's major.minor")
    parser.add_argument("--checkout", type=Path, default=_TOP, help="default: the one that this tool lies in")
    parser.add_argument("--cache", type=Path, default=root.CACHE, help="where roots are kept (%(default)s)")
    parser.add_argument("--mirror", help="a Debian mirror; default: the one that apt is set up with")
    parser.add_argument("--anew", action="store_true", help="make the root again: Debian sid moves on")
    parser.add_argument(
        "--bind",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="shown to CMD at the same path, writable",
    )
    return parser


def main() -> int:
    # argparse would take options after RELEASE for the end of CMD.
    words, command = sys.argv[1:], []
    if "--" in words:
        words, command = words[: words.index("--")], words[words.index("--") + 1 :]
    arguments = build_parser().parse_args(words)
    try:
        if os.geteuid() != 0:
            raise ReleaseError(f"roots and namespaces need root, this is uid {os.geteuid()}: use sudo")
        checkout = arguments.checkout.resolve()
        binds = [directory.resolve() for directory in arguments.bind]
        for directory in (checkout, *binds):
            if not directory.is_dir():
                raise ReleaseError(f"{directory} is not a directory")
        wanted = root.recipe(arguments.release, checkout, arguments.mirror)
        cache = arguments.cache.resolve()
        with root.held(cache, wanted, anew=arguments.anew) as found:
            print(root.described(found), file=sys.stderr, flush=True)
            return run.run(found, checkout, command, binds, stage=cache / "stage") if command else 0
    except ReleaseError as exc:
        print(f"tests.releases: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
