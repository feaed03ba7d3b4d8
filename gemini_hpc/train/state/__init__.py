"""The training state: found, named, captured into slots, restored."""
