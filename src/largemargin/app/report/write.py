"""``report``: runs or geometries in, one HTML file out."""

from dataclasses import replace
from pathlib import Path

from largemargin.app.report.matplotlib_charts import write_pictures
from largemargin.app.report.page import render, slug
from largemargin.app.report.report_models import Reportable, Subject, Subjects, read_subjects
from largemargin.app.report.sample_views import Look, observe
from largemargin.app.report.sections import all_sections
from largemargin.app.training.files import write_text
from largemargin.errors import LargeMarginError


def report(
    given: Reportable,
    path: str | Path = "report.html",
    *,
    features: str = "tsne",
    layers: tuple[str, ...] = ("penultimate",),
    max_samples: int = 500,
    noise: float = 0.06,
    device: str = "cpu",
    title: str | None = None,
    png: str | Path | None = None,
) -> Path:
    """Write a self-contained HTML report and return its path.

    Args:
        given: a :class:`~largemargin.Geometry`, a run or its folder, the folder of a comparison, a
            ``geometry.json``, several of them in a list, or in a dict by the name to show.
        path: the file to write.
        features: how samples of runs are placed in the plane: "tsne" (default), "pca" (faster), or
            "none", which leaves models and images alone.
        layers: names of modules to show there; default what enters the head.
        max_samples: how many samples to place, default 500, the same number of each class.
        noise: standard deviation of the noise of the noisy picture, in units of [0, 1] pixels.
        device: where the passes through models run.
        title: of the page; default the names of the models.
        png: folder for static pictures of all figures (needs matplotlib).

    Example:
        >>> import largemargin as lm
        >>> features, weight = torch.randn(60, 4), torch.randn(3, 4)
        >>> geometry = lm.measure_arrays(features, torch.arange(60) % 3, weight)
        >>> report(geometry, tmp_path / "report.html").name
        'report.html'
    """
    look = Look(features, tuple(layers), max_samples, noise, device)
    look.check()
    target = Path(path)
    if target.is_dir():
        raise LargeMarginError(f"{target} is a folder. Name a file: {target / 'report.html'}.")
    subjects = _looked_at(read_subjects(given), look)
    sections = all_sections(subjects)
    text = render(subjects, sections, title or _title(subjects))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text.encode(errors="replace").decode())
    except OSError as error:
        raise LargeMarginError(f"cannot write {target}: {error.strerror}.") from error
    if png is not None:
        charts = [chart for section in sections for chart in section.charts]
        write_pictures([replace(chart, key=slug(chart.key)) for chart in charts], png)
    return target


def _looked_at(subjects: Subjects, look: Look) -> Subjects:
    if look.features == "none":
        return subjects
    around: dict[str, int] = {}
    seen: list[Subject] = []
    for each in subjects.each:
        if each.run is not None:
            key = each.data_key
            found = observe(each.run, each.geometry, look, around=around.get(key))
            if found.surface_of is not None:
                around.setdefault(key, found.surface_of)
            each = replace(each, observed=found)
        seen.append(each)
    return replace(subjects, each=tuple(seen))


def _title(subjects: Subjects) -> str:
    names = [each.name for each in subjects.each]
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
