"""``report``: read the models, look at their samples, build the sections, write the page."""

from dataclasses import replace
from pathlib import Path

from largemargin.app.report.matplotlib_charts import write_pictures
from largemargin.app.report.page import render, slug
from largemargin.app.report.report_models import ReportModels, ReportSources, read_models
from largemargin.app.report.sample_views import ViewOptions, view_samples
from largemargin.app.report.sections import all_sections
from largemargin.app.training.files import damage_named, write_text
from largemargin.errors import LargeMarginError


def report(
    source: ReportSources,
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
        source: a :class:`~largemargin.Geometry`, a run or its folder, the folder of a comparison, a
            ``geometry.json``, several of them in a list, or in a dict by the name to show.
        path: the file to write.
        features: how samples of runs are placed in the plane: "tsne" (default), "pca" (faster), or
            "none", which leaves models and images alone.
        layers: names of modules to show there; default "penultimate", what enters the head.
        max_samples: how many samples to place, default 500, the same number of each class.
        noise: standard deviation of the noise of the noisy picture, in units of [0, 1] pixels; 0
            leaves it out.
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
    options = ViewOptions(features, tuple(layers), max_samples, noise, device)
    options.check()
    target = Path(path)
    if target.is_dir():
        raise LargeMarginError(f"{target} is a folder. Name a file: {target / 'report.html'}.")
    with damage_named("a file of what is reported"):
        models = read_models(source)
    models = _with_views(models, options)
    with damage_named("a file of what is reported"):
        sections = all_sections(models)
        text = render(models, sections, title or models.title).encode(errors="replace").decode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
    except OSError as error:
        raise LargeMarginError(f"cannot write {target}: {error.strerror}.") from error
    if png is not None:
        charts = [chart for section in sections for chart in section.charts]
        write_pictures([replace(chart, key=slug(chart.key)) for chart in charts], png)
    return target


def _with_views(models: ReportModels, options: ViewOptions) -> ReportModels:
    """The models with views of their samples: the one place where a report runs models."""
    if options.features == "none":
        return models
    viewed = (
        replace(model, views=view_samples(model.run, model.geometry, options))
        if model.run is not None
        else model
        for model in models
    )
    return replace(models, models=tuple(viewed))
