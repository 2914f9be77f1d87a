"""The same bytes on every host."""
