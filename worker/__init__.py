"""One device: model, slots, KV bytes, and the executor of this process."""
