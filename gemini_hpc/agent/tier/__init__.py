"""The agent's part of the persistent tier: saves, and what is saved of a job that has lost a node."""
