"""Formats in memory and on disk, shared by agents, trainings and tools: slots, shards, small state, types."""
