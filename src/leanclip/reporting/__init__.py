"""The HTML report of a training run."""

from leanclip.reporting.report import write_report

__all__ = ["write_report"]
