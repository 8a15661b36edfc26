"""Packing data sets into shards, and checking them."""
