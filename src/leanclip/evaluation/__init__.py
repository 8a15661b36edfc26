"""How good is a model: retrieval, and pictures of it."""

from leanclip.evaluation.embed import Embedded, embed
from leanclip.evaluation.panel import hardest_negatives, retrieval_panel
from leanclip.evaluation.retrieval import RECALLS, retrieval_metrics

__all__ = ["RECALLS", "Embedded", "embed", "hardest_negatives", "retrieval_metrics", "retrieval_panel"]
