"""Transports that carry a shard's bytes from the rank that has it to the ranks of its other holders."""
