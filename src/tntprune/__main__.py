"""`python -m tntprune`, which torchrun starts."""

from tntprune.cli import run

run()
