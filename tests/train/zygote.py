"""Forks training processes for the tests from one process that has torch imported already: an import costs seconds.

Reads one JSON request a line: {"env", "options", "out", "err"}; answers with {"pid"}, and {"pid", "code"} at its end.
With "module" and "arguments" in place of options the process is `python -m MODULE ARGUMENTS`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import sys
import traceback

# What trainings of other stacks import, imported here when the first of them is asked for.
STACKS = {
    "huggingface": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning.pytorch",),
    "fabric": ("lightning.fabric",),
    "accelerate": ("accelerate",),
}


def main() -> None:
    import torch._dynamo  # which an optimizer imports
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    from tests.train import worker  # torch and all the rest

    assert torch.distributed.fsdp and torch.distributed.checkpoint and torch._dynamo
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    buffer = b""
    while True:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        part = os.read(0, 1 << 20)
        if not part:
            return
        buffer += part
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            request = json.loads(line)
            for name in STACKS.get((request.get("options") or {}).get("stack", ""), ()):
                importlib.import_module(name)
            pid = os.fork()
            if pid == 0:
                # the child leaves this loop and ends as any Python process does: hooks, atexit, finalization
                for name, number in (("out", 1), ("err", 2)):
                    fd = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(fd, number)
                    os.close(fd)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for name in [n for n in os.environ if n.startswith(("GEMINI_", "SLURM_"))]:
                    del os.environ[name]
                os.environ.update(request["env"])
                if "module" in request:
                    sys.argv[1:] = request["arguments"]
                    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
                else:
                    worker.main(request["options"])
                return
            children.add(pid)
            print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
            sys.exit(1)
        raise error
