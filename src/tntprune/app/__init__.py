"""The explorer: what happens to a photo, in a browser."""
