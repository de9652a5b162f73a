"""Every recipe against the protocols in this folder, every reported number against its cell."""

import csv
from pathlib import Path

import pytest
from largemargin_papers.recipes import Cell, cells_of, read_claims, read_recipe
from largemargin_papers.recipes.cells import run_name
from largemargin_papers.recipes.metrics import METRICS
from largemargin_papers.recipes.queue import tasks_of
from largemargin_papers.recipes.reproduce import read_cells
from papers.recipes.more_protocols import RECIPES, UNPRINTED
from papers.recipes.protocols import PLAIN

from largemargin.app.training import to_dict
from largemargin.app.training.objective import objective_of

PAPERS = Path(__file__).resolve().parents[3] / "papers"


def load(name: str) -> tuple[Path, list[Cell]]:
    path = PAPERS / f"{name}.yaml"
    return path, read_cells(path, read_recipe(path))


def flat(values: dict, before: str = "") -> dict:
    found = {}
    for name, value in values.items():
        if isinstance(value, dict) and before + name not in ("model.options", "objective.settings"):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = tuple(value) if isinstance(value, list) else value
    return found


def test_every_table_has_its_recipe() -> None:
    files = {path for path in PAPERS.glob("*/*.yaml") if (path.parent / "claims").is_dir()}
    assert {f"{path.parent.name}/{path.stem}" for path in files} == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_settings_are_those_of_the_paper(name: str) -> None:
    protocol, count, _ = RECIPES[name]
    _, cells = load(name)
    assert len(cells) == count
    for cell in cells:
        if not cell.train:
            continue
        expected = protocol(cell.key)
        found = flat(to_dict(cell.config))
        wanted = PLAIN | expected.settings
        assert {key: found[key] for key in wanted} == wanted, cell.name
        assert cell.runs == expected.runs
        assert cell.config.seed == 0
        # Each of these decides the result, so the protocol must have said something about it.
        assert {"data.name", "data.augment", "model.name", "epochs", "batch_size"} <= wanted.keys()
        assert {f"optimizer.{each}" for each in ("name", "lr", "weight_decay", "clip_norm")} <= (
            wanted.keys()
        )


@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_the_paper(name: str) -> None:
    protocol = RECIPES[name][0]
    for cell in load(name)[1]:
        if not cell.train:
            continue
        wanted = protocol(cell.key).terms
        built = objective_of(cell.config.objective, [20] * 8)(8, 16)
        assert built.weights == {term: weight for term, (weight, _) in wanted.items()}, cell.name
        for term, (_, numbers) in wanted.items():
            loss = built.terms[term]
            assert {key: getattr(loss, key) for key in numbers} == numbers, cell.name


@pytest.mark.parametrize("name", RECIPES)
def test_every_reported_number_has_one_cell_or_a_reason(name: str) -> None:
    path, cells = load(name)
    recipe = read_recipe(path)
    claims = read_claims(recipe, path.parent / recipe.claims, cells)
    with (path.parent / recipe.claims).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == RECIPES[name][2]
    assert len(claims) == len(rows) * len(recipe.measures)
    assert all((claim.cell is None) == bool(claim.reason) for claim in claims)
    for claim in claims:
        if claim.cell is not None:
            assert (claim.reported is None) == (name in UNPRINTED), claim.key
            assert claim.measure.metric in METRICS
    answered = {claim.cell.name for claim in claims if claim.cell is not None}
    compared = {
        tuple({**claim.cell.key, **claim.measure.against}.values())
        for claim in claims
        if claim.cell is not None and claim.measure.against
    }
    idle = [
        cell.name
        for cell in cells
        if cell.name not in answered and tuple(cell.key.values()) not in compared
    ]
    assert idle == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_what_they_need_and_what_they_assume(name: str) -> None:
    recipe = read_recipe(PAPERS / f"{name}.yaml")
    assert "data" in recipe.data_needed
    assert recipe.readings
    paper = (PAPERS / name).parent / "README.md"
    assert Path(name).name in paper.read_text()


def test_the_queue_names_cells_that_there_are() -> None:
    """Runs that tables share are in it once, and nothing of data that is not at hand."""
    tasks = tasks_of(PAPERS / "queue.yaml")
    assert {task.config.data.name for task in tasks} == {"cifar10", "cifar100", "mnist"}
    shared = [task for task in tasks if len({place.recipe for place in task.places}) == 3]
    assert {place.cell for task in shared for place in task.places} == {
        cell.format(percent)
        for cell in ("CIFAR10, ours, {}", "CIFAR10, partial momentum, {}", "CIFAR10, {}, 6.0")
        for percent in (20, 40, 60, 80)  # those with all images are in a figure, too
    } | set(METHODS)
    assert all(task.images for task in tasks)


def test_long_tails_have_the_published_counts() -> None:
    """BAS-IMB: CIFAR-10 at ratio 100, 12406 images."""
    import torch

    from largemargin.app.data import DataConfig
    from largemargin.app.data.modify import thin_out
    from largemargin.app.data.samples import Samples

    cell = next(
        each
        for each in load("ltlm/table2")[1]
        if each.key["imbalance"] == "long-tailed"
        and (each.key["ratio"], each.key["dataset"]) == ("100", "CIFAR-10")
    )
    labels = torch.arange(10).repeat(5000)
    whole = Samples(
        pixels=torch.zeros(50000, 1, 1, 1, dtype=torch.uint8),
        labels=labels,
        ids=[str(i) for i in range(50000)],
    )
    config: DataConfig = cell.config.data
    thin = thin_out(whole, 10, config)
    counts = torch.bincount(thin.labels).tolist()
    assert counts == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert sum(counts) == 12406


def test_errata_are_in_the_claims() -> None:
    def rows(name: str) -> list[dict[str, str]]:
        with (PAPERS / name).open() as file:
            return list(csv.DictReader(file))

    # D3: within and between were exchanged; the printed ratio decides.
    for row in [*rows("odn/claims/table2.csv"), *rows("odn/claims/table3.csv")]:
        ratio = float(row["between_class_var"]) / float(row["within_class_var"])
        assert ratio == pytest.approx(float(row["between_over_within"]), abs=0.02)
    # N5: the same runs stand in two tables, with two digits exchanged in one.
    ours = {
        (row["dataset"], row["train_percent"]): row["accuracy"]
        for row in rows("lmd/claims/table3.csv")
        if row["method"] == "ours"
    }
    partial = {
        (row["dataset"], row["train_percent"]): row["accuracy"]
        for row in rows("lmd/claims/table2.csv")
        if row["strategy"] == "partial momentum"
    }
    differing = {key for key in ours if ours[key] != partial[key]}
    assert differing == {("SVHN", "40")}


def test_tables_of_a_paper_share_their_runs() -> None:
    def names(table: str, **part: str) -> set[str]:
        return {
            run_name(cell.config)
            for cell in load(table)[1]
            if all(cell.key[column] == value for column, value in part.items())
        }

    ours = names("lmd/table3", method="ours")
    assert len(ours) == 10
    assert ours == names("lmd/table2", strategy="partial momentum")
    assert ours == names("lmd/table1", delta_d="6.0")
    assert names("robust/table3") == names("robust/table4")


READ = "authors' code"
METHODS = (
    "Normal training",
    "Training only on noisy images",
    "Training on both clean and noisy images",
    "Stability training",
    "Ours",
)


def test_the_authors_code_is_a_reading_of_its_own() -> None:
    """ROB: what their scripts do where the paper is silent, method by method."""
    path = PAPERS / "robust/table1.yaml"
    recipe = read_recipe(path, READ)
    cells = {cell.key["method"]: cell.config for cell in read_cells(path, recipe)}
    assert {config.data.validation_from for config in cells.values()} == {"test"}
    found = {
        method: (config.noise.use, config.noise.clip, config.noise.crop, config.noise.joined)
        for method, config in cells.items()
    }
    assert found == {
        "Normal training": ("none", False, "same", False),
        "Training only on noisy images": ("noisy", True, "same", False),
        "Training on both clean and noisy images": ("clean_and_noisy", True, "own", True),
        "Stability training": ("pair", True, "own", False),
        "Ours": ("pair", True, "own", False),
    }
    loss = objective_of(cells["Ours"].objective, [20] * 8)(8, 16).terms["robust_discriminative"]
    halves = {"alpha": 0.5, "noise_weight": 0.5, "beta": 1.0, "softmax_weight": 1.0}
    others = {"momentum": 0.99, "first_seen": "full", "margin": 5.0, "gamma_reg": 1e-5}
    wanted = halves | others
    assert {name: getattr(loss, name) for name in wanted} == wanted
    claims = read_claims(recipe, path.parent / recipe.claims, list(read_cells(path, recipe)))
    noisy = [each.measure for each in claims if each.measure.metric == "noisy_accuracy"]
    assert len(noisy) == 25
    assert all(measure.options["clip"] for measure in noisy)
    best = [each for each in recipe.record if each.metric == "best_on_test"]
    assert {each.options.get("sigma") for each in best} == {
        None,
        *(f"{level}/255" for level in (2, 4, 8, 16, 20)),
    }


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("lmd", "robust"))])
def test_readings_change_what_they_say_and_leave_the_printed_one(name: str) -> None:
    path = PAPERS / f"{name}.yaml"
    printed = read_recipe(path)
    if not printed.variants:
        pytest.skip("it has one reading")
    assert printed.variant(READ).differs
    pairs = list(
        zip(read_cells(path, printed), read_cells(path, read_recipe(path, READ)), strict=True)
    )
    assert [one.key for one, _ in pairs] == [other.key for _, other in pairs]
    same = {
        tuple(one.key.values())
        for one, other in pairs
        if run_name(one.config) == run_name(other.config)
    }
    softmax = {key for key in (tuple(one.key.values()) for one, _ in pairs) if "softmax" in key}
    without = {key for key in (tuple(one.key.values()) for one, _ in pairs) if "no momentum" in key}
    assert same == softmax | without


def test_an_unknown_reading_is_refused() -> None:
    path = PAPERS / "lmd/table3.yaml"
    with pytest.raises(ValueError, match=r"no reading 'theirs'\. It has \"authors' code\""):
        read_recipe(path, "theirs")
    with pytest.raises(ValueError, match="It has only the printed one"):
        read_recipe(PAPERS / "odn/table1.yaml", READ)


def test_unknown_settings_are_refused() -> None:
    path = PAPERS / "lmd/table3.yaml"
    recipe = read_recipe(path)
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate is no setting"):
        cells_of(recipe, changes={"optimizer.learning_rate": 0.1})
