"""Files, processes, clocks and precision: what knows the machine and nothing about tokens."""
