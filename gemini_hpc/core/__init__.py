"""Pure rules and state machines: no I/O, no clock, no torch; everything else stands on them."""
