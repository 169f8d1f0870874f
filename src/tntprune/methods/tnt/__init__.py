"""Training Noise Token pruning."""
