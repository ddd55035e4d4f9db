"""Attention over paged KV: one interface, one backend a file."""
