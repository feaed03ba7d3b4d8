"""What the checkpointer needs of a device: events, streams, pinned memory, copies."""
