"""Ways to bring a shard's bytes from the rank that has it to the ranks of its other holders."""
