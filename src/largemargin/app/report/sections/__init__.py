"""The sections of the report, in the order of the page."""

from largemargin.app.report.charts import Section
from largemargin.app.report.report_models import ReportModels
from largemargin.app.report.sections.features import features_section, worst_section
from largemargin.app.report.sections.margins import margins_section
from largemargin.app.report.sections.provenance import provenance_section
from largemargin.app.report.sections.robustness import robustness_section
from largemargin.app.report.sections.theory import theory_section
from largemargin.app.report.sections.training import training_section
from largemargin.app.report.sections.verdicts import verdict_section


def all_sections(models: ReportModels) -> tuple[Section, ...]:
    return tuple(
        make(models)
        for make in (
            verdict_section,
            training_section,
            margins_section,
            features_section,
            worst_section,
            robustness_section,
            theory_section,
            provenance_section,
        )
    )


__all__ = ["all_sections"]
