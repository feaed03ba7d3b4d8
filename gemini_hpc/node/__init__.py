"""The code that runs as root on a node: prolog, epilog, reaper and their helpers. Standard library only."""
