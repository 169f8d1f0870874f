"""Models as files for other runtimes: `export` writes them, `check` says whether they are right."""
