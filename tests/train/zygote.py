"""The zygote of training processes, which has torch imported.

With "options" a child is what worker.py says; with "module" and "arguments" it is `python -m MODULE ARGUMENTS`.
"""

from __future__ import annotations

import runpy
import sys

import torch._dynamo  # which an optimizer imports
import torch.distributed.checkpoint
import torch.distributed.fsdp

from tests.forking import Request, serve
from tests.train import worker  # torch and all the rest

assert torch.distributed.fsdp and torch.distributed.checkpoint and torch._dynamo


def train(request: Request) -> None:
    if "module" in request:
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        worker.main(request["options"])


if __name__ == "__main__":
    serve(train)
