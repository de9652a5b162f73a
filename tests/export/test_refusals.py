"""What is not saved or loaded, and why; and that nothing half-done is left behind."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.export import load, read_config, save
from largemargin.export import saved_model as folder_module
from largemargin.export.tensor_files import is_pickle

pytest.importorskip("safetensors", reason="needs safetensors: pip install 'largemargin[export]'")


def net(width=8, classes=5, bias=True):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, classes, bias=bias))


@pytest.fixture
def saved(tmp_path):
    model = net()
    criterion = lm.attach(model, lm.CosFace(margin=torch.full((5,), 0.2), scale=8.0))
    return save(tmp_path / "run", model, criterion, config={"width": 8})


def edit(path, change):
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def refused(path, model=None, **options):
    """The message, after checking that the model was left as it was."""
    model = net() if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(LargeMarginError) as caught:
        load(path, model, **options)
    assert [type(module) for module in model.modules()] == kinds
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(module._forward_hooks for module in model.modules())
    return str(caught.value)


def test_folders_that_are_not_ours(tmp_path, saved):
    assert "there is no folder" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "vit"}')
    assert "was not written by largemargin" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("[1]")
    assert "was not written by largemargin" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"format": "largem')
    assert "is not JSON" in refused(tmp_path / "empty")


def test_newer_formats_and_missing_files(saved):
    (saved / "criterion.safetensors").rename(saved / "kept")
    assert "holds no criterion.safetensors" in refused(saved)
    (saved / "kept").rename(saved / "criterion.safetensors")
    edit(saved, lambda config: config.update(format_version=99, largemargin="9.0"))
    message = refused(saved)
    assert "format version 99, written by largemargin 9.0" in message
    assert "Upgrade" in message


@pytest.mark.parametrize("name", ["model.safetensors", "criterion.safetensors"])
def test_files_that_were_cut_short(saved, name):
    whole = (saved / name).read_bytes()
    for part in (whole[:-4], whole[:5], b""):
        (saved / name).write_bytes(part)
        assert "is not a whole safetensors file" in refused(saved)
    (saved / name).write_bytes(b"\x80\x04pickle" * 20)
    assert "is a pickle" in refused(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("head"), "is damaged"),
        (lambda c: c["criterion"].pop("attach"), "is damaged"),
        (lambda c: c["criterion"]["objective"][0].update(loss="os.system"), "does not have"),
        (
            lambda c: c["criterion"]["objective"][0]["arguments"].update(margin={"$tensor": "no"}),
            "is damaged",
        ),
        (lambda c: c["criterion"]["objective"][0]["arguments"].update(new=1), "other arguments"),
        (lambda c: c["criterion"]["objective"][0]["arguments"].update(scale=-1.0), "scale"),
        (
            lambda c: c["criterion"].update(schedules=[{"schedule": "math", "arguments": {}}]),
            "'math' is not one of",
        ),
        (lambda c: c["head"].update(layer="0"), "has 5 classes and 8 features"),
        (lambda c: c["head"].update(layer="classifier"), "no layer 'classifier'"),
    ],
)
def test_edited_configurations(saved, change, message):
    edit(saved, change)
    assert message in refused(saved)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [{}, {"weight": [0.5] * 9}, list(range(300))], ids=len)
def test_a_pickle_of_any_protocol_and_size_is_called_one(tmp_path, protocol, value):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(value, protocol))
    assert is_pickle(path)
    for legacy in (False, True):
        torch.save(value, path, _use_new_zipfile_serialization=not legacy)
        assert is_pickle(path)
    save_file({"weight": torch.ones(2)}, path)
    assert not is_pickle(path)
    assert not is_pickle(tmp_path / "missing")


def test_only_an_entry_that_says_tensor_is_one():
    kept = {"place": torch.ones(2)}
    assert folder_module.decode({"$tensor": "place"}, kept).tolist() == [1, 1]
    for damaged in ({"$tensor": "elsewhere"}, {"$tenor": "place"}):
        with pytest.raises(LargeMarginError, match="means nothing, or names a tensor"):
            folder_module.decode(damaged, kept)


class Kept(nn.Identity):
    """Keeps something beside tensors, as a tokenizer or a counter does."""

    kept: object = None

    def get_extra_state(self):
        return {"kept": self.kept}

    def set_extra_state(self, state):
        self.kept = 1 + state["kept"] - 1


def scheduled(*, own):
    """A model that keeps something, attached or not, and as trained as the random numbers say."""
    model = nn.Sequential(nn.Linear(6, 8), Kept(), nn.Linear(8, 5))
    model[1].kept = int(torch.randint(100, ()))
    if not own:
        return model, None
    losses = lm.Objective(face=lm.CosFace(scale=8.0), center=lm.CenterLoss(5, 8))
    schedule = lm.schedules.Ramp("face.margin", 0.0, steps=6)
    criterion = lm.attach(model, losses, schedule=schedule)
    nn.init.normal_(criterion.objective.terms["center"].centers)
    return model, criterion


def parts(model, criterion):
    """Everything that loading could change."""
    tensors, others = {}, [[repr(model), *map(id, model.modules()), *map(id, model.parameters())]]
    for owner in filter(None, (model, criterion)):
        for name, value in owner.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensors[len(tensors)] = value.clone()
            else:
                others.append((name, repr(value)))
    others += [sorted(module._forward_hooks) for module in model.modules()]
    return tensors, [*others, repr(criterion)]


def places(value, *above):
    """The way to everything inside lists and dictionaries."""
    if above:
        yield above
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], *above, key)


@pytest.mark.parametrize("value", [None, -1, 0, 10**400, float("nan"), "x", [], {"a": None}])
def test_what_is_refused_leaves_everything_as_it_was(value, tmp_path):
    """Every entry of the configuration in turn; for a criterion built anew, given, or none."""
    path = save(tmp_path / "run", *scheduled(own=True), class_names=list("abcde"))
    file, refusals = path / "config.json", 0
    text = file.read_text()
    for place in places(json.loads(text)):
        config = inner = json.loads(text)
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        file.write_text(json.dumps(config))
        for given in ("saved", "none", None):
            model, criterion = scheduled(own=given is None)
            tensors, others = parts(model, criterion)
            try:
                load(path, model, criterion=given or criterion)
            except LargeMarginError:
                refusals += 1
                after = parts(model, criterion)
                assert after[1] == others, place
                for one, other in zip(tensors.values(), after[0].values(), strict=True):
                    assert one.dtype == other.dtype, place
                    assert torch.equal(one, other), place
            else:
                assert place[0] != "head", (place, value)
    assert refusals > 60


@pytest.mark.parametrize("own", ["class", "linear"])
def test_a_criterion_on_another_kind_of_head(own, tmp_path):
    """The saved form must not be put on a head that the criterion given trains otherwise."""
    path = save(tmp_path / "run", *scheduled(own=True))
    model = nn.Sequential(nn.Linear(6, 8), Kept(), nn.Linear(8, 5, bias=False))
    if own == "class":
        model[2] = lm.ClassHead(8, 5, similarity="euclidean")
    criterion = lm.attach(model, lm.CrossEntropy())
    with pytest.raises(LargeMarginError, match="similarity='cosine' and scale=8, but the crit"):
        load(path, model, criterion=criterion)
    assert criterion.layer is model[2]


def test_models_that_do_not_fit(saved):
    message = refused(saved, net(width=9))
    assert "has 5 classes and 8 features, but the model's has 5 and 9" in message
    assert "5 classes and 8 features" in refused(saved, net(classes=4))
    deeper = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    message = refused(saved, deeper)
    assert "the folder lacks 1.weight, 1.bias, 1.running_mean, 1.running_var" in message
    narrow = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 5))
    assert "0.weight (8, 6) for (8, 7)" in refused(saved, narrow)
    bare = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(8, 5))
    assert "the model lacks 0.bias, 0.weight" in refused(saved, bare)


def test_not_strict_loads_what_is_in_both(saved):
    deeper = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    load(saved, deeper, strict=False)
    other = net()
    load(saved, other)
    assert torch.equal(deeper[0].weight, other[0].weight)
    narrow = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 5))
    with pytest.raises(LargeMarginError, match="other shapes"):
        load(saved, narrow, strict=False)


def test_criteria_that_do_not_fit(saved, tmp_path):
    assert '"saved", "none"' in refused(saved, criterion=True)
    other = net()
    criterion = lm.attach(other, lm.CosFace())
    assert "another model" in refused(saved, criterion=criterion)
    with pytest.raises(LargeMarginError, match="does not fit the criterion"):
        load(saved, other, criterion=criterion)
    save(tmp_path / "alone", net())
    with pytest.raises(LargeMarginError, match="a model alone"):
        load(tmp_path / "alone", other, criterion=criterion)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"a": {1: 2}}}, r"config\['a'\] must be JSON"),
        ({"config": {"a": [1, torch.tensor(1.0)]}}, r"config\['a'\]\[1\] must be .* a Tensor"),
        ({"config": {"a": float("nan")}}, "it is nan"),
        ({"class_names": ["a"]}, "1 names"),
        ({"class_names": [1, 2, 3, 4, 5]}, "list of str"),
        ({"layer": "nothing"}, "no layer 'nothing'"),
        ({"criterion": lm.CosFace()}, r"save\(path, model, criterion\)"),
    ],
)
def test_arguments_of_save(options, message, tmp_path):
    with pytest.raises(LargeMarginError, match=message):
        save(tmp_path / "run", net(), **options)
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_saved(tmp_path):
    model = net()
    criterion = lm.attach(model, lm.CosFace())
    with pytest.raises(LargeMarginError, match="another model"):
        save(tmp_path / "run", net(), criterion)
    criterion.undo()
    with pytest.raises(LargeMarginError, match="undo"):
        save(tmp_path / "run", model, criterion)
    with pytest.raises(LargeMarginError, match="meta device"):
        save(tmp_path / "run", net().to("meta"))
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(LargeMarginError, match=r"'graph' is torch\.sparse_coo"):
        save(tmp_path / "run", model)
    assert list(tmp_path.iterdir()) == []


def test_extra_state_of_modules(tmp_path):
    class Counting(nn.Linear):
        seen: object = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = nn.Sequential(Counting(6, 8), nn.Linear(8, 5))
    model[0].seen = 12
    save(tmp_path / "run", model)
    again = nn.Sequential(Counting(6, 8), nn.Linear(8, 5))
    load(tmp_path / "run", again)
    assert again[0].seen == 12
    model[0].seen = {1, 2}
    with pytest.raises(LargeMarginError, match=r"extra state '0._extra_state'.*it is a set"):
        save(tmp_path / "other", model)


def test_existing_paths(saved, tmp_path):
    with pytest.raises(LargeMarginError, match="overwrite=True"):
        save(saved, net())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("precious", "file"):
        with pytest.raises(LargeMarginError, match="not written by save"):
            save(tmp_path / name, net(), overwrite=True)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "mine"
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(LargeMarginError, match="not all that is in it"):
        save(saved, net(), overwrite=True)
    (saved / "notes.txt").unlink()
    with pytest.raises(LargeMarginError, match="no folder"):
        save(tmp_path / "a" / "b", net())
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", net())
    model = net()
    save(saved, model, overwrite=True, config={"new": 1})
    assert load(saved, net()).config == {"new": 1}
    assert not (saved / "criterion.safetensors").exists()
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"run", "precious", "file", "empty"}


def test_a_failure_leaves_the_old_folder(saved, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space left on device")

    before = {each.name: each.read_bytes() for each in saved.iterdir()}
    monkeypatch.setattr(folder_module, "write_tensors", fail)
    for path in (saved, tmp_path / "new"):
        with pytest.raises(OSError, match="no space"):
            save(path, net(), overwrite=True)
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save(saved, net(), overwrite=True)
    assert {each.name: each.read_bytes() for each in saved.iterdir()} == before
    assert list(tmp_path.iterdir()) == [saved]


def test_the_old_folder_returns_where_the_new_one_cannot_take_its_name(
    saved, tmp_path, monkeypatch
):
    rename, before = Path.rename, read_config(saved)

    def stubborn(self, target):
        if ".tmp-" in self.name:
            raise OSError("busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stubborn)
    with pytest.raises(OSError, match="busy"):
        save(saved, net(), overwrite=True)
    assert read_config(saved) == before
    assert list(tmp_path.iterdir()) == [saved]


def test_missing_safetensors_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'largemargin\[export\]'"):
        save(tmp_path / "run", net())
