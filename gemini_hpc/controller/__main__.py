"""The controller's command line; the controller runs in the foreground.

python -m gemini_hpc.controller [--config PATH] [--verbose]
"""

from __future__ import annotations

import argparse
import sys

from gemini_hpc.config import CONFIG_PATH, ConfigError, load_site_settings
from gemini_hpc.controller.service import main


def run(argv: list[str] | None = None) -> int:
    """Run the controller and return the exit status."""
    parser = argparse.ArgumentParser(prog="gemini_hpc.controller", description="The gemini-hpc controller service.")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="log every Slurm command with its duration")
    args = parser.parse_args(argv)
    try:
        settings = load_site_settings(args.config)
    except ConfigError as exc:
        print(f"gemini-hpc controller: {exc}", file=sys.stderr)
        return 2
    return main(settings, args.verbose)


if __name__ == "__main__":
    sys.exit(run())
