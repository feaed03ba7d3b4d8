"""What runs as root on a node: prolog, epilog, the reaper, and what they need. Standard library only."""
