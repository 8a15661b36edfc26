"""Locked towers run once: the features of every sample."""
