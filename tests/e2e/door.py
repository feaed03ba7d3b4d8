"""One rank of a training with another stack on a cluster: `door.py OPTIONS`, beside a copy of
tests/integrations/stacks.py. What the rank tells at its end goes into a file of its own."""

import contextlib
import json
import sys
from pathlib import Path

import stacks

import gemini_hpc

gemini_hpc.set_ranks()
options = json.loads(sys.argv[1])
with Path(f"told.{stacks.rank()}").open("w") as told, contextlib.redirect_stdout(told):
    stacks.main(options)
