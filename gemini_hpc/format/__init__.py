"""Formats in memory and on disk, the same for agents, trainings and tools: slots, shards, small state, types."""
