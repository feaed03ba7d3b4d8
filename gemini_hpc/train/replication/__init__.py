"""Replication: transfer of captured versions to their holders."""
