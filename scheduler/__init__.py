"""Pure decisions: no torch, no Ray, no clock, no I/O."""
