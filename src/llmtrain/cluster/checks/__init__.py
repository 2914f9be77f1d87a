"""Judges, one module per area: facts in, findings out. Pure."""
