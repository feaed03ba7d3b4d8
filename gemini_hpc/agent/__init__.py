"""The agent: one process per job and node that owns the replicas' memory."""
