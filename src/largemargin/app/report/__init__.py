"""The HTML report of a model. ``largemargin.report(run, "report.html")``."""

from largemargin.app.report.page import report

__all__ = ["report"]
