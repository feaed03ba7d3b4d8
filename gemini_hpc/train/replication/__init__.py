"""Bringing captured versions to their holders."""
