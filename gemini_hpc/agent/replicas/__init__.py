"""Replica data of one agent: memory, slots, the trainings that they belong to, and the votes on them."""
