"""Models as files for other runtimes: one file per format; `base.py` says what a format is."""
