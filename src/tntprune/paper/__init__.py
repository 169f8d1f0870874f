"""What the TNT paper published, and with which settings of ours its multiply-accumulates come out."""

from tntprune.paper.settings import Published, published

__all__ = ["Published", "published"]
