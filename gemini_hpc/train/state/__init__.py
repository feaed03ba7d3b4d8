"""The training state: finding, naming, capture into slots and restoring."""
