"""Memory and time of a training step before it is run: memory by tracing, time by a roofline model of the GPU,
communication by a model of the network."""
