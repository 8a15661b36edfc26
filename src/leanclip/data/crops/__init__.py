"""Crops that workers decode and the GPU resizes."""
