"""The sections of the report, one file each, and :func:`all_sections`."""

from largemargin.app.report.charts import Section
from largemargin.app.report.report_models import ReportModels
from largemargin.app.report.sections.features import features_section
from largemargin.app.report.sections.margins import margins_section
from largemargin.app.report.sections.mistakes import mistakes_section
from largemargin.app.report.sections.provenance import provenance_section
from largemargin.app.report.sections.robustness import robustness_section
from largemargin.app.report.sections.theory import theory_section
from largemargin.app.report.sections.training import training_section
from largemargin.app.report.sections.verdicts import verdict_section


def all_sections(models: ReportModels) -> tuple[Section, ...]:
    """In the order of the page."""
    return (
        verdict_section(models),
        mistakes_section(models),
        margins_section(models),
        features_section(models),
        robustness_section(models),
        training_section(models),
        theory_section(models),
        provenance_section(models),
    )


__all__ = ["all_sections"]
