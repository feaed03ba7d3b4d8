"""Transfers of slots' bytes to and from other nodes."""
