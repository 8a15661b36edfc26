"""Pairs whose caption looks wrong: found in a run's table or by its model, listed, and shown."""
