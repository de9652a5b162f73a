"""The Python of questions.md and coming_from.md runs, and what they name exists."""

import math
import re
from pathlib import Path

import pytest
import torch

import largemargin as lm
from largemargin.losses.base.constructor_arguments import CALLED, ELSEWHERE

FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = ("questions.md", "coming_from.md")


@pytest.mark.parametrize("page", PAGES)
def test_its_python_runs(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, page, "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"\blm\.([A-Za-z_.]+)", text)):
        found: object = lm
        for part in name.strip(".").split("."):
            found = getattr(found, part)


def test_the_table_has_the_words_that_errors_answer() -> None:
    text = (FOLDER / "coming_from.md").read_text(encoding="utf-8")
    known = {word for words in CALLED.values() for word in words} | set(ELSEWHERE)
    table = text[text.index("## Arguments") : text.index("## Trainers")]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(\w+)(?:=True)?`", row)}
    assert named - known <= {"miner", "indices_tuple", "W"}


def test_a_class_of_the_table_is_answered_with_what_stands_beside_it() -> None:
    text = (FOLDER / "coming_from.md").read_text(encoding="utf-8")
    table = text[text.index("## Losses") : text.index("## Defaults")]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("|")][2:]
    beside: dict[str, str] = {}
    for theirs, ours in rows:
        for name in re.findall(r"`([A-Z]\w+)", theirs):
            beside[name] = beside.get(name, "") + ours
    unknown = {name: ours for name, ours in beside.items() if not hasattr(lm, name)}
    assert len(unknown) > 20
    for name, ours in unknown.items():
        with pytest.raises(AttributeError, match="Did you mean") as told:
            getattr(lm, name)
        meant = str(told.value).removesuffix("?").rpartition(" ")[2]
        assert re.search(rf"\b{re.escape(meant)}[`(]", ours), name


def margin_of_insightface(cosines: torch.Tensor, by_angle: bool) -> torch.Tensor:
    """Target cosines with insightface's margin of 0.5: its class of today, and the one before."""
    if by_angle:
        with torch.no_grad():
            moved = (cosines.arccos() + 0.5).cos()
        return cosines + (moved - cosines).detach()
    added = cosines * math.cos(0.5) - (1 - cosines**2).sqrt() * math.sin(0.5)
    straight = cosines - math.sin(math.pi - 0.5) * 0.5
    return torch.where(cosines > math.cos(math.pi - 0.5), added, straight)


@pytest.mark.parametrize(
    ("by_angle", "loss"),
    [
        (False, lm.ArcFace(margin=0.5, scale=8.0, ignore_index=-1)),
        (
            True,
            lm.ArcFace(margin=0.5, scale=8.0, mode="none", gradient="detached", ignore_index=-1),
        ),
    ],
)
def test_arcface_of_insightface_is_what_the_table_says(by_angle: bool, loss: lm.Loss) -> None:
    """Value and gradient, beyond pi - m too, with samples of no class."""
    x, w = torch.randn(60, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    x[0], y = -w[0] + 0.1, torch.arange(60) % 4
    y[7] = y[20] = -1
    gradients = []
    values = []
    for own in (True, False):
        leaves = [each.clone().requires_grad_() for each in (x, w)]
        if own:
            value = loss(*leaves, y)
        else:
            unit = [torch.nn.functional.normalize(each) for each in leaves]
            logits = (unit[0] @ unit[1].T)[y >= 0]
            target = torch.nn.functional.one_hot(y[y >= 0], 4).bool()
            moved = torch.where(target, margin_of_insightface(logits, by_angle), logits)
            value = torch.nn.functional.cross_entropy(8.0 * moved, y[y >= 0])
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, leaves))
    torch.testing.assert_close(*values)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def default_rows() -> dict[str, str]:
    """What has no arguments elsewhere, and what the page calls equal here, as code."""
    text = (FOLDER / "coming_from.md").read_text(encoding="utf-8")
    table = text[text.index("## Defaults") : text.index("## Arguments")]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    named = [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in cells[2:]]
    return {left[0]: right[0] for left, right in named}


COUNTS = [100, 50, 20, 5]


def of_the_authors(name: str, q: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The first training batch by the authors' class without further arguments, per sample."""
    cosines = torch.nn.functional.normalize(q) @ torch.nn.functional.normalize(w).T
    own = torch.nn.functional.one_hot(y, len(w)).bool()
    angles, norms, logits = cosines.arccos(), q.norm(dim=1, keepdim=True), q @ w.T
    cost: torch.Tensor | float = 0.0
    match name:
        case "AdaFace":
            quality = (0.333 * (norms - norms.mean()) / (norms.std() + 1e-3)).clamp(-1, 1)
            moved = (angles - 0.4 * quality).clamp(0, math.pi).cos() - 0.4 * (1 + quality)
            logits = 64 * torch.where(own, moved, cosines)
        case "CurricularFace":
            hard = cosines > (angles[own] + 0.5).cos()[:, None]
            rivals = torch.where(hard, cosines * (0.01 * cosines[own].mean() + cosines), cosines)
            logits = 64 * torch.where(own, margin_of_insightface(cosines, by_angle=False), rivals)
        case "ElasticArcFace":
            drawn = 0.5 + 0.0125 * torch.randn(len(y), dtype=q.dtype)[:, None]
            logits = 64 * torch.where(own, (angles + drawn).cos(), cosines)
        case "ElasticCosFace":
            drawn = 0.35 + 0.0125 * torch.randn(len(y), dtype=q.dtype)[:, None]
            logits = 64 * torch.where(own, cosines - drawn, cosines)
        case "MagLoss":
            length = norms.clamp(10, 110)
            margins = 0.45 + (0.8 - 0.45) * (length - 10) / (110 - 10)
            easy = torch.where(cosines > 0, (angles + margins).cos(), cosines)
            logits = 64 * torch.where(own, easy, cosines)
            cost = 35 * (length / 110**2 + 1 / length).squeeze(1)
        case "VSLoss(cls_num_list)":
            shares = torch.tensor(COUNTS, dtype=q.dtype) / sum(COUNTS)
            stretch = (1 / shares) ** 0.3
            logits = logits / (stretch / stretch.min()) + shares.log()
        case "LogitNormLoss":
            logits = logits / (logits.norm(dim=1, keepdim=True) + 1e-7)
    return torch.nn.functional.cross_entropy(logits, y, reduction="none") + cost


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, w = torch.randn(40, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    return 20 * torch.rand(40, 1, dtype=torch.float64) * q, w, torch.arange(40) % 4


def of_the_table(name: str) -> lm.Loss:
    known = {kind.__name__: kind for kind in lm.LOSSES.values()}
    loss: lm.Loss = eval(default_rows()[name], {**known, "class_counts": COUNTS, "math": math})
    return loss.double()


@pytest.mark.parametrize(
    "name",
    [
        *("AdaFace", "CurricularFace", "ElasticArcFace", "ElasticCosFace", "MagLoss"),
        *("VSLoss(cls_num_list)", "LogitNormLoss"),
    ],
)
def test_the_defaults_of_the_authors_are_what_the_table_says(name: str) -> None:
    q, w, y = problem()
    loss = of_the_table(name)
    loss.reduction = "none"
    values = []
    for of in (loss, lambda *rows: of_the_authors(name, *rows)):
        torch.manual_seed(6)
        values.append(of(q, w, y))
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss"])
def test_the_defaults_of_pytorch_metric_learning_are_what_the_table_says(name: str) -> None:
    reason = "pytorch-metric-learning is an extra"
    theirs = getattr(pytest.importorskip("pytorch_metric_learning.losses", reason=reason), name)(
        4, 6
    )
    q, w, y = problem()
    theirs.W.data = w.T.clone()
    torch.testing.assert_close(of_the_table(name)(q, w, y), theirs(q, y), rtol=1e-9, atol=1e-9)
