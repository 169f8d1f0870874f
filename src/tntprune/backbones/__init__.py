"""One file per family of models; `base.py` says what an adapter is."""
