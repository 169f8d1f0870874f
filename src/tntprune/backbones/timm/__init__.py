"""timm's models."""
