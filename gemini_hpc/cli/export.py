"""`gemini-hpc export`: a version of the persistent tier as a checkpoint that other programs load."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini_hpc.tier.version import Manifest

    _Subparsers = argparse._SubParsersAction[Any]

FORMATS = ("safetensors", "dcp", "torch")


class ExportError(Exception):
    """One line for the user."""


def register(subparsers: _Subparsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint of the persistent tier in another format",
        description="Write a version of the persistent tier as safetensors (all tensors by name), as a checkpoint of "
        "torch.distributed.checkpoint, or as one file of torch.save; the last two have model, optimizer and the "
        "other state under their names.",
    )
    parser.add_argument(
        "what",
        metavar="JOBID|DIR",
        help="a job (with --tier), or a directory: of a version, of a set, of a job, or the tier itself",
    )
    parser.add_argument("--tier", metavar="DIR", default="", help="the job's --gemini-tier")
    parser.add_argument("--set", metavar="NAME", default="", help="where a job has several (Checkpointer(name=...))")
    parser.add_argument("--version", metavar="N", type=int, default=0, help="the version's number (default: newest)")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to write")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="file (dcp: directory) to make")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """The exit status: 0; 1 with one line on stderr."""
    try:
        where, manifest = _find(args.what, args.tier, args.set, args.version)
        if os.path.lexists(args.output):
            raise ExportError(f"{args.output} is there already")
        print(f"version {manifest.stamp[1]} of job {manifest.job}, set {manifest.set}: {manifest.world} ranks")
        _write(where, manifest, args.format, args.output)
    except (ExportError, OSError, ValueError) as error:
        print(f"gemini-hpc export: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"gemini-hpc export: {args.format} needs a package that is not here: {error}", file=sys.stderr)
        return 1
    return 0


def _find(what: str, tier: str, set_name: str, number: int) -> tuple[str, Manifest]:
    """Directory and manifest of a version. Raises ExportError, ValueError, OSError."""
    from gemini_hpc.tier.find import find
    from gemini_hpc.tier.version import job_directory

    if not what.isdecimal():
        return find(what, set_name, number)
    if not tier:
        raise ExportError(f"job {what}: where is its tier? Give --tier DIR, or the directory itself")
    return find(job_directory(tier, int(what)), set_name, number)


def _write(where: str, manifest: Manifest, form: str, output: str) -> None:
    from gemini_hpc.tier import whole

    temporary = f"{output}.{os.getpid()}.tmp"
    found = whole.read(where, manifest)
    if form == "safetensors":
        from safetensors.torch import save_file

        about = {"job": str(manifest.job), "set": manifest.set, "version": str(manifest.stamp[1]), "format": "pt"}
        tensors = {**found.tensors, **found.small["buffers"]}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=about)
    elif form == "torch":
        import torch

        torch.save(whole.as_state(found), temporary)
    else:
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        state = whole.as_state(found)
        state_dict_saver.save(state, storage_writer=FileSystemWriter(temporary), no_dist=True)
    os.rename(temporary, output)
    print(f"{output}: {form}, {len(found.tensors)} tensors")
