"""What one agent holds: memory, slots, the trainings that they belong to, and the votes on them."""
