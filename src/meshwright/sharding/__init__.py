"""Which array lives where, and why: rules, fsdp, tensor, batch."""
