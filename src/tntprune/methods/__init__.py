"""One file per method; `base.py` says what a method is."""
