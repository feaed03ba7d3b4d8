"""Examples at the end of each verb's help."""

from __future__ import annotations

import argparse

_HEAD = "examples:\n"
EXAMPLES = {
    "jobs": ("gemini-hpc jobs", "gemini-hpc jobs --since 3d --json"),
    "inspect": ("gemini-hpc inspect 42", "gemini-hpc inspect 42 --watch", "gemini-hpc inspect 10_3 --json"),
    "report": ("gemini-hpc report 42", "gemini-hpc report 42 --rank 3 -o pictures/"),
    "node": ("gemini-hpc node n3", "sudo gemini-hpc node n3 --json"),
    "flush": ("gemini-hpc flush 42",),
    "evacuate": ("gemini-hpc evacuate 42 n3",),
    "requeue": ("gemini-hpc requeue --after-save 42",),
    "versions": ("gemini-hpc versions 42", "gemini-hpc versions /lustre/ada/ckpt"),
    "export": (
        "gemini-hpc export 42 --format safetensors -o weights.safetensors",
        "gemini-hpc export /lustre/ada/ckpt --version 800 --format dcp -o dcp/",
    ),
    "run": (
        "gemini-hpc run -- srun python train.py",
        "gemini-hpc run --max-restarts 5 -- srun torchrun train.py",
        "gemini-hpc run --own-agents --replicas 2 -- srun python train.py",
    ),
    "controller": ("gemini-hpc controller --verbose", "gemini-hpc controller --daemon"),
    "doctor": ("sudo gemini-hpc doctor", "sudo gemini-hpc doctor --cluster", "sudo gemini-hpc doctor --canary debug"),
    "install": ("gemini-hpc install --dry-run", "gemini-hpc install --dry-run --slurm-conf new/slurm.conf"),
    "plan": (
        "gemini-hpc plan --nodes 128 --state 1.1TB --network 200Gbps \\",
        "    --memory 1TB --iteration 12",
    ),
    "simulate": (
        "gemini-hpc simulate --figure gemini-15a",
        "gemini-hpc simulate --nodes 1000 --state 1.1TB --days 30",
    ),
    "demo": ("sudo gemini-hpc demo", "sudo gemini-hpc demo --victim batch-host --cuts 2"),
}


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that folds paragraphs and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        folded = (
            "\n".join(f"{indent}{line}" for line in part.splitlines())
            if part.startswith(_HEAD)
            else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )
        return "\n\n".join(folded)


def add_examples(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Append the examples to the help of each verb."""
    for verb, lines in EXAMPLES.items():
        parser = verbs.choices[verb]
        examples = _HEAD + "\n".join(f"  {line}" for line in lines)
        parser.epilog = f"{parser.epilog}\n\n{examples}" if parser.epilog else examples
        parser.formatter_class = HelpFormatter
