"""Device access for the checkpointer: events, streams, pinned memory and copies."""
