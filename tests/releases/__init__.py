"""The project on other releases of Slurm than this machine's: a Debian root for each, made once, entered many times.

`python -m tests.releases --help`. What a run changes lives in its own memory and namespaces, and is gone with it.
"""
