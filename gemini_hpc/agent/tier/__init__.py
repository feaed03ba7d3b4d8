"""The agent's part of the persistent tier: saves, and salvage for a job that has lost a node."""
