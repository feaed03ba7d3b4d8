"""The zygote of training processes, which has torch imported.

With "options" a child is what worker.py says; with "module" and "arguments" it is `python -m MODULE ARGUMENTS`.
"""

from __future__ import annotations

import importlib
import runpy
import sys

import torch._dynamo  # which an optimizer imports
import torch.distributed.checkpoint
import torch.distributed.fsdp

from tests.forking import Request, serve
from tests.train import worker  # torch and all the rest

assert torch.distributed.fsdp and torch.distributed.checkpoint and torch._dynamo

# What trainings of other stacks import, imported here when the first of them is asked for.
STACKS = {
    "huggingface": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning.pytorch",),
    "fabric": ("lightning.fabric",),
    "accelerate": ("accelerate",),
}


def prepare(request: Request) -> None:
    """Import the stack of a training, in the zygote."""
    for name in STACKS.get((request.get("options") or {}).get("stack", ""), ()):
        importlib.import_module(name)


def train(request: Request) -> None:
    if "module" in request:
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        worker.main(request["options"])


if __name__ == "__main__":
    serve(train, prepare)
