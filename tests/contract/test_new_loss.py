"""A new loss is one file and one line: everything that goes by the name of a loss finds it."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import largemargin as lm
from contract.problems import Sizes, call, random_problem
from contract.zoo import ZOO, build
from largemargin import functional
from largemargin.integrations.objective_text import objective_for, parse_sum
from largemargin.losses import LOSSES
from largemargin.losses.base.settings import settings_of

FILE = '''
"""The squared hinge on the largest rival."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from largemargin.losses.base.loss import LogitLoss
from largemargin.losses.base.setting_ranges import Limits, Range
from largemargin.losses.base.terms import (
    at_target,
    check_setting,
    class_count,
    over_targets,
    require,
    stats_of,
)


class SquaredHinge(LogitLoss):
    r"""Squared multi-class hinge (BAS-SQUARED), :math:`[f_{c^*} - f_y + \\rho]_+^2`.

    Args:
        margin: rho, a number or one per class (C,); default 1.

    Example:
        >>> SquaredHinge()(torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([0]))
        tensor(0.2500)
    """

    key: ClassVar[str] = "squared_hinge"
    widens_margins: ClassVar[bool] = True
    limits: ClassVar[dict[str, Limits]] = {"margin": {}}
    search_space: ClassVar[dict[str, Range]] = {"margin": Range(0.1, 10.0)}

    def __init__(self, *, margin: float | Tensor = 1.0, **options: Any) -> None:
        super().__init__(**options)
        check_setting("margin", margin)
        self._keep("margin", margin)

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return squared_hinge(*inputs, margin=self.margin, **logits, **self.how)


def squared_hinge(features, prototypes, labels=None, *, margin=1.0, **options):
    """Squared hinge per sample; :class:`SquaredHinge` has the equation."""
    count = class_count(features, prototypes, labels)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rival"), options)
    required = at_target(margin, labels, count, "margin")
    gap = require(stats.rival) - require(stats.target) + required
    return over_targets(F.relu(gap) ** 2, labels)
'''
LINE = "from squared_hinge import SquaredHinge; LOSSES[SquaredHinge.key] = SquaredHinge"


@pytest.fixture
def new_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[lm.Loss]:
    path = tmp_path / "squared_hinge.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("squared_hinge", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "squared_hinge", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(LOSSES, module.SquaredHinge.key, module.SquaredHinge)
    return module.SquaredHinge


def test_names(new_loss: type[lm.Loss]) -> None:
    assert lm.LOSSES["squared_hinge"] is new_loss
    assert lm.SquaredHinge is new_loss
    assert functional.squared_hinge(torch.zeros(1, 2), torch.tensor([0])).tolist() == [1.0]
    with pytest.raises(AttributeError, match="squared_hing"):
        functional.squared_hing  # noqa: B018


def test_attach_trains_with_it(new_loss: type[lm.Loss]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    criterion = lm.attach(model, new_loss(margin=2.0))
    optimizer = torch.optim.SGD(criterion.param_groups(model), lr=0.05)
    inputs, labels = torch.randn(16, 3), torch.arange(16) % 4
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        value = criterion(model(inputs), labels)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert list(criterion.terms) == ["squared_hinge"]
    assert values[-1] < 0.9 * values[0]


def test_objective_text(new_loss: type[lm.Loss]) -> None:
    text = "cross_entropy + 0.5*squared_hinge"
    assert [term.name for term in parse_sum(text, {})] == ["cross_entropy", "squared_hinge"]
    objective = objective_for(text, {"squared_hinge": {"margin": 3.0}})(4, 3)
    assert objective.weights == {"softmax": 1.0, "squared_hinge": 0.5}
    assert objective.terms["squared_hinge"].margin == 3.0
    summed = lm.CrossEntropy() + 0.5 * new_loss(margin=3.0)
    assert repr(summed) == repr(objective)
    assert "squared_hinge.margin" in [setting.path for setting in settings_of(objective)]


def test_list_and_tuning(new_loss: type[lm.Loss], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
    from largemargin.app.cli import command
    from largemargin.app.training.tuning import dimension_of

    assert command.main(["list", "squared_hinge"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("squared_hinge  (lm.SquaredHinge, on features and prototypes)")
    assert "[f_(c^*) - f_y + ρ]_+^2" in out
    assert "margin = 1.0  rho, a number or one per class (C,); default 1" in out
    assert dimension_of("squared_hinge", "margin") == new_loss.search_space["margin"]


def test_docs_table(new_loss: type[lm.Loss], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs"))
    make_tables = importlib.import_module("make_tables")
    rows = [line for line in make_tables.page().splitlines() if "SquaredHinge(margin=1.0" in line]
    assert len(rows) == 1
    assert "$[f_{c^*} - f_y + \\rho]_+^2$" in rows[0]


def test_the_zoo_builds_a_problem_for_it(new_loss: type[lm.Loss]) -> None:
    assert ZOO["squared_hinge"].kind == "samples"
    problem = random_problem(Sizes(6, 4, 3))
    value = call(build("squared_hinge", problem), problem)
    assert math.isfinite(float(value))


def test_the_contract_suite_runs_over_it(tmp_path: Path) -> None:
    """The tests of this folder, in a process of their own: they ask for the losses when read."""
    (tmp_path / "squared_hinge.py").write_text(FILE)
    (tmp_path / "register.py").write_text(f"from largemargin.losses import LOSSES\n{LINE}\n")
    here = Path(__file__).parent
    files = [here / f"test_{name}.py" for name in ("gradients", "purity", "module", "oracle")]
    options = ("-q", "-p", "register", "-p", "no:cacheprovider", "-k", "squared_hinge")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(last.split(" passed")[0].split()[-1]) >= 20, last
