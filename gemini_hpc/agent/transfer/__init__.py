"""Slots' bytes on their way to and from other nodes."""
