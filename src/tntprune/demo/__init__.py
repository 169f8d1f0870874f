"""The demo: cluttered digits, and the page that it writes."""
