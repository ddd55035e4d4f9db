"""Counter-based random numbers and batched token sampling."""
