"""Pure rules and state machines without I/O, clock or torch, on which everything else is built."""
