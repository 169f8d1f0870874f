"""The vision towers of Hugging Face's transformers."""
