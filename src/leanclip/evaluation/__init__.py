"""Evaluation of a model: retrieval, zero-shot classification, and examples for the report."""

from leanclip.evaluation.embed import Embedded, EvaluationSettings, embed
from leanclip.evaluation.example_panel import earlier_best, hardest_negatives, retrieval_panel
from leanclip.evaluation.labelled_sets import (
    LabelledSet,
    Prompts,
    bundled_groups,
    labelled_sets,
    open_imagenet,
    open_labelled,
    prompts_for,
)
from leanclip.evaluation.retrieval import RECALLS, recall_text, retrieval_metrics
from leanclip.evaluation.zero_shot import Classified, classify, summary, zero_shot_metrics

__all__ = [
    "RECALLS",
    "Classified",
    "Embedded",
    "EvaluationSettings",
    "LabelledSet",
    "Prompts",
    "bundled_groups",
    "classify",
    "earlier_best",
    "embed",
    "hardest_negatives",
    "labelled_sets",
    "open_imagenet",
    "open_labelled",
    "prompts_for",
    "recall_text",
    "retrieval_metrics",
    "retrieval_panel",
    "summary",
    "zero_shot_metrics",
]
