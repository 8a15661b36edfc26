"""Parts of the two towers: their layers, what is frozen, towers put together from two models."""
