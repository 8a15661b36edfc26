"""Use of a trained model: embeddings of a data set on disk, nearest neighbours in them, and a local page to look."""
