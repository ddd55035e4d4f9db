"""Looped models: configuration, layers, weights, and which of them exist."""
