"""Training of scorers and fine-tuning: one loop, its options, and runs that resume."""
