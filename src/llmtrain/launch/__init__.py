"""Prepare a run, start it through DeepSpeed and pdsh, watch it, end it."""
