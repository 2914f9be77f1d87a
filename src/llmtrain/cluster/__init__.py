"""Reaching the hosts: the only door out of this machine."""
