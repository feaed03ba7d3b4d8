"""The checkpointer in a training's processes: capturing, replicating and restoring its state."""
