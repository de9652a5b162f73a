"""Warnings: given once, when they are due, in training that cannot work, and never otherwise."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.dropin import MarginWarning
from largemargin.dropin.training_warnings import ENTRIES, Watch, _Traces
from largemargin.dropin.zero_rows import fill_zero_rows
from largemargin.losses.base.schedules import Ramp


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def network(dim: int = 16, num_classes: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, dim), nn.Linear(dim, num_classes)
    )


class Trained:
    """A short training on digits, and what it warned of."""

    def __init__(
        self,
        objective: object,
        *,
        calls: int = 120,
        lr: float = 0.1,
        trains: Callable[[nn.Sequential], Iterator[nn.Parameter]] = nn.Module.parameters,
        watch: Watch | None = None,
        num_classes: int = 10,
        labels: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
        accumulate: int = 1,
        steps_every: int | None = None,
        **options: object,
    ) -> None:
        self.model = network(num_classes=num_classes)
        self.criterion = lm.attach(self.model, objective, accumulate=accumulate, **options)
        if watch is not None:
            self.criterion._watch = watch
        optimizer = torch.optim.SGD(trains(self.model), lr=lr, momentum=0.9)
        images, targets = digits()
        draw = torch.Generator().manual_seed(1)
        steps_every = steps_every or accumulate
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for call in range(1, calls + 1):
                rows = torch.randint(len(images), (64,), generator=draw)
                value = self.criterion(self.model(images[rows]), labels(targets[rows]))
                (value / steps_every).backward()
                if call % steps_every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        self.caught = [each for each in caught if issubclass(each.category, MarginWarning)]
        assert len(self.caught) == len(caught), [str(each.message) for each in caught]
        self.said = [str(each.message) for each in self.caught]
        with torch.no_grad():
            self.accuracy = (self.model(images).argmax(1) == targets).float().mean().item()


def test_the_patience_users_get() -> None:
    watch = Watch()
    assert (watch.patience, watch.stuck_after) == (500, 200)
    assert (watch.views_per_class, watch.labels_after, watch.bands_after) == (500, 20, 100)


def quick(**options: int) -> Watch:
    early = {"patience": 40, "stuck_after": 20, "views_per_class": 100, "labels_after": 40}
    return Watch(**{**early, **options})


class TestHealthyTraining:
    @pytest.mark.parametrize(
        "make",
        [
            lambda c, d: lm.CosFace(margin=0.2, scale="auto"),
            lambda c, d: lm.ArcFace(margin=0.2, scale=8.0),
            lambda c, d: lm.CrossEntropy(),
            lambda c, d: lm.Objective(softmax=lm.CrossEntropy(), lmd=0.1 * lm.Discriminative(c, d)),
        ],
    )
    def test_says_nothing(self, make: Callable[[int, int], lm.Loss]) -> None:
        run = Trained(make, watch=quick(), calls=330, lr=0.03)
        assert run.said == []
        assert run.accuracy > 0.95

    @pytest.mark.slow
    def test_with_the_patience_users_get(self) -> None:
        run = Trained(lm.CosFace(margin=0.2, scale=16.0), calls=1010)
        assert run.said == []
        assert run.accuracy > 0.95
        assert run.criterion._watch.calls == 1010

    def test_accumulated_gradients(self) -> None:
        run = Trained(
            lm.CosFace(margin=0.2, scale="auto"), watch=quick(stuck_after=3), accumulate=4
        )
        assert run.said == []
        late = Trained(lm.CosFace(scale="auto"), watch=quick(stuck_after=3), steps_every=4)
        assert "has not changed in 3 training calls" in late.said[0]  # it was not told

    def test_results_are_the_same_without(self) -> None:
        values = []
        for watch in (True, False):
            run = Trained(lm.CosFace(scale=8.0), warn=watch, watch=quick() if watch else None)
            values.append([p.detach().clone() for p in run.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


class TestAngles:
    def test_training_that_does_not_take_hold(self) -> None:
        run = Trained(lm.ArcFace(margin=1.2, scale=64.0), lr=0.5, watch=quick(), calls=170)
        (said,) = run.said
        assert "after 40 training calls 100% of the samples" in said
        assert 'schedule="preset"' in said
        assert run.accuracy < 0.5
        assert Path(run.caught[0].filename).name == Path(__file__).name

    def test_the_cure_it_names(self) -> None:
        total = 500
        loss = lm.ArcFace(margin=0.5, scale="auto")
        run = Trained(loss, schedule="preset", total_steps=total, calls=total)
        assert run.said == []
        assert loss.margin == 0.5
        assert run.accuracy > 0.95

    def test_not_before_every_class_was_seen_often(self) -> None:
        model = network(num_classes=700)  # 14,000 samples are enough after 219 calls
        criterion = lm.attach(model, lm.CosFace(), warn=True)
        criterion._watch = quick()
        hopeless = -model[3].weight.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(319):
                self.behind(criterion, hopeless)
        with pytest.warns(MarginWarning, match="after 320 training calls 100%"):
            self.behind(criterion, hopeless)

    @staticmethod
    def behind(criterion: lm.Criterion, features: torch.Tensor) -> None:
        labels = torch.randint(700, (64,))
        criterion._watch(criterion, features[labels], labels, criterion.head)

    def test_ignored_rows_and_soft_targets_do_not_count(self) -> None:
        weight = torch.eye(3, 4)
        head = lm.ClassHead(4, 3, similarity="cosine")
        head.weight.data = weight
        criterion = lm.attach(nn.Sequential(head), lm.CosFace(scale=1.0, ignore_index=2))
        watch = Watch(patience=1)
        labels = torch.tensor([0, 2, 2, 3, -100, 7] * 40)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            watch(
                criterion,
                torch.where(labels[:, None] == 0, weight[:1], -1.0),
                labels,
                criterion.head,
            )
        watch = Watch(patience=1)
        soft = torch.nn.functional.one_hot(torch.tensor([0, 1, 2] * 40), 3) * 0.9 + 0.03
        with pytest.warns(MarginWarning, match="100% of the samples"):
            watch(criterion, (1 - 2 * soft) @ weight, soft, criterion.head)

    def test_more_classes_than_features(self) -> None:
        head = lm.ClassHead(2, 5, similarity="cosine")
        criterion = lm.attach(nn.Sequential(head), lm.CosFace(scale=1.0))
        labels = torch.arange(4, -1, -1).repeat(40)
        features = head.weight.detach()[labels] * torch.where(labels < 2, 1, -1)[:, None]
        with pytest.warns(MarginWarning, match="60% of the samples"):
            Watch(patience=1)(criterion, features, labels, criterion.head)

    def test_other_heads_have_no_angles(self) -> None:
        run = Trained(lm.CrossEntropy(), lr=0.0, watch=quick(stuck_after=10_000), calls=50)
        assert run.said == []


class TestParameters:
    def test_a_head_the_optimizer_does_not_have(self) -> None:
        run = Trained(
            lm.CosFace(margin=0.2, scale=16.0), watch=quick(), trains=lambda m: m[:3].parameters()
        )
        (said,) = run.said
        assert "the weight of the head gets gradients but has not changed in 20 training" in said
        assert "criterion.param_groups(model)" in said

    def test_weight_and_bias_of_a_linear_head(self) -> None:
        run = Trained(lm.CrossEntropy(), watch=quick(), trains=lambda m: m[:3].parameters())
        assert [said.split(" gets")[0] for said in run.said] == [
            "the weight of the head",
            "the bias of the head",
        ]

    def test_frozen_on_purpose(self) -> None:
        model = network()
        model[3].requires_grad_(False)
        criterion = lm.attach(model, lm.CosFace(scale=16.0))
        criterion._watch = quick()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(30):
                criterion(model(torch.randn(4, 64)), torch.tensor([0, 1, 2, 3])).backward()

    def test_a_head_that_is_trained_later_has_its_own_time(self) -> None:
        model = network()
        criterion = lm.attach(model, lm.CrossEntropy())
        criterion._watch = quick()
        images, labels = digits()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for call in range(1, 71):
                model[3].requires_grad_(call > 40)  # and is not in the optimizer
                criterion(model(images[:64]), labels[:64]).backward()
                assert bool(caught) == (call > 60)
        assert "has not changed in 20 training calls" in str(caught[0].message)

    def test_no_gradient_no_warning(self) -> None:
        model = network()
        criterion = lm.attach(model, lm.CrossEntropy())
        criterion._watch = quick()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(30):  # no backward pass: somebody measures the loss in training mode
                criterion(model(torch.randn(4, 64)), torch.tensor([0, 1, 2, 3]))

    def test_parameters_of_a_loss(self) -> None:
        loss = lm.CrossEntropy()
        loss.temperature = nn.Parameter(torch.ones(()))
        plain = loss.per_sample
        loss.per_sample = lambda *args, **options: plain(*args, **options) * loss.temperature
        (said,) = Trained(loss, watch=quick()).said
        assert said.startswith("terms.cross_entropy.temperature of the loss gets gradients")

    def test_large_weights_are_sampled(self) -> None:
        weight = torch.zeros(3_000_000, requires_grad=True)
        traces = _Traces(weight, 1)
        assert traces._values.numel() == ENTRIES
        assert traces._places[[0, -1]].tolist() == [0, 2_999_999]
        traces.listen(weight)
        weight.sum().backward()
        assert traces.stuck(weight)
        assert not weight._backward_hooks


class TestBanks:
    @staticmethod
    def lmd(num_classes: int, dim: int) -> lm.Objective:
        parts = {"softmax": lm.CrossEntropy(), "lmd": 0.1 * lm.Discriminative(num_classes, dim)}
        return lm.Objective(**parts)

    def test_classes_that_never_come(self) -> None:
        run = Trained(self.lmd, num_classes=17, watch=quick(), lr=0.01)
        (said,) = run.said
        assert "has never seen 7 of its 17 classes (10, 11, 12, 13, 14, ...) in 2560" in said

    def test_every_bank_is_looked_at(self) -> None:
        banks = [lm.CentroidBank(4, 2) for _ in range(2)]
        banks[0].seen.fill_(True)
        banks[1].seen[:3] = True
        watch = Watch(views_per_class=1)
        watch.samples = 4
        with pytest.warns(MarginWarning, match=r"never seen 1 of its 4 classes \(3\)"):
            watch._look_at_banks(SimpleNamespace(banks=banks))

    def test_not_before_there_was_a_chance(self) -> None:
        run = Trained(self.lmd, num_classes=17, watch=quick(views_per_class=1000), lr=0.01)
        assert run.said == []

    def test_a_bank_that_is_never_written(self) -> None:
        def make(num_classes: int, dim: int) -> lm.Objective:
            lmd = lm.Discriminative(num_classes, dim, accumulate=None)
            return lm.Objective(softmax=lm.CrossEntropy(), lmd=0.1 * lmd)

        (said,) = Trained(make, watch=quick(), lr=0.01).said
        assert "10 of its 10 classes" in said
        assert "commit_with(optimizer)" in said


class TestCeiling:
    def warned(self, loss: lm.Loss, num_classes: int = 8, dim: int = 3) -> list[str]:
        model = nn.Sequential(nn.Linear(5, dim), nn.Linear(dim, num_classes))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lm.attach(model, loss)
        assert all(each.category is MarginWarning for each in caught)
        assert all(Path(each.filename).name == Path(__file__).name for each in caught)
        return [str(each.message) for each in caught]

    def test_margins_around_the_ceiling(self) -> None:
        from largemargin.heads import packing_bound

        angle = packing_bound(8, 3)
        cosine = 1 - math.cos(angle)
        for low, high in (
            (lm.CosFace(margin=cosine - 1e-3), lm.CosFace(margin=cosine + 1e-3)),
            (lm.ArcFace(margin=angle - 1e-3), lm.ArcFace(margin=angle + 1e-3)),
            (lm.UnifiedMargin(m2=angle - 1e-3), lm.UnifiedMargin(m2=angle + 1e-3)),
            (lm.UnifiedMargin(m3=cosine - 1e-3), lm.UnifiedMargin(m3=cosine + 1e-3)),
        ):
            assert self.warned(low) == []
            (said,) = self.warned(high)
            assert type(high).__name__ in said
            assert "8 classes in 3 dimensions" in said

    def test_what_it_says(self) -> None:
        (said,) = self.warned(lm.ArcFace(margin=1.4))
        assert "margin (radians) of ArcFace (term 'arcface') is 1.4" in said
        assert "more than 1.34" in said
        assert "wider features" in said

    def test_of_margins_per_class_the_smallest_counts(self) -> None:
        assert self.warned(lm.CosFace(margin=torch.tensor([1.1] * 7 + [0.1]))) == []
        assert len(self.warned(lm.CosFace(margin=torch.full((8,), 1.1)))) == 1
        assert self.warned(lm.LDAM([8, 7, 6, 5, 4, 3, 2, 1])) == []

    def test_best_packings_are_below_it(self) -> None:
        for num_classes, dim in ((5, 3), (9, 3), (12, 4), (30, 5)):
            angle = lm.best_packing(num_classes, dim, steps=60, restarts=2).angle
            assert self.warned(lm.ArcFace(margin=angle), num_classes, dim) == []
            assert self.warned(lm.CosFace(margin=1 - math.cos(angle)), num_classes, dim) == []

    def test_the_scale_free_discriminative_loss(self) -> None:
        assert self.warned(lm.StableDiscriminative(8, 3)) == []
        assert len(self.warned(lm.StableDiscriminative(8, 3, margin=0.9))) == 1


@pytest.mark.slow
def test_features_beside_their_prototypes_gain_nothing_over_the_ceiling() -> None:
    """No arrangement of features and prototypes, searched for freely, passes the ceiling."""
    from largemargin.heads import packing_bound

    for num_classes, dim in ((5, 2), (6, 3), (8, 3)):
        ceiling = 1 - math.cos(packing_bound(num_classes, dim))
        found = []
        for _ in range(3):
            rows = torch.randn(2 * num_classes, dim, dtype=torch.float64, requires_grad=True)
            optimizer = torch.optim.Adam([rows], lr=0.05)
            best = -math.inf
            for step in range(400):
                x, w = nn.functional.normalize(rows, dim=1).split(num_classes)
                cosines = x @ w.T
                gaps = cosines.diagonal()[:, None] - cosines
                gaps = gaps[~torch.eye(num_classes, dtype=torch.bool)]
                best = max(best, gaps.min().item())
                sharp = 5 + step / 4
                optimizer.zero_grad()
                (torch.logsumexp(-sharp * gaps, 0) / sharp).backward()
                optimizer.step()
            found.append(best)
        assert max(found) <= ceiling + 1e-9
        assert max(found) > 0.5 * ceiling  # a search may end where classes lie upon each other


def test_copies_and_pickles_carry_on() -> None:
    run = Trained(lm.CosFace(scale=8.0), watch=quick(), calls=25)
    watch = run.criterion._watch
    for twin in (copy.deepcopy(watch), pickle.loads(pickle.dumps(watch))):
        assert (twin.calls, twin.samples) == (25, 1600)
    model, criterion = copy.deepcopy((run.model, run.criterion))
    criterion(model(torch.randn(4, 64)), torch.tensor([0, 1, 2, 3])).backward()
    assert criterion._watch.calls == 26
    assert watch.calls == 25


def test_warn_false_watches_nothing() -> None:
    run = Trained(
        lm.ArcFace(margin=1.2, scale=64.0), lr=0.5, warn=False, schedule=Ramp("scale", 1.0, steps=5)
    )
    assert run.criterion._watch is None
    assert run.said == []


@pytest.mark.gpu
# The debug mode announces itself with a warning.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_ordinary_steps_do_not_wait_for_the_device() -> None:
    model = network().cuda()
    criterion = lm.attach(model, TestBanks.lmd)
    cosine = lm.attach(network().cuda(), lm.CosFace(scale=8.0))
    for each in (criterion, cosine):
        each._watch = quick()
        labels = torch.randint(10, (300,), device="cuda")
        head = each.head
        features = head.weight.detach()[labels]
        for bank in each.banks:
            bank.seen.fill_(True)
        for call in range(1, 60):
            due = call in (21, 40)
            torch.cuda.set_sync_debug_mode("default" if due else "error")
            try:
                each._watch(each, features, labels, head)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def zeros(bias: bool = True, rows: int = 10) -> nn.Sequential:
    model = network()
    model[3] = nn.Linear(16, 10, bias=bias)
    nn.init.zeros_(model[3].weight[:rows].detach())
    return model


SILENT_AT_ZERO = {
    "arcface": lm.ArcFace(scale=8.0, margin=0.1),
    "cosface": lm.CosFace(scale=8.0, margin=0.1),
    "lm_softmax": lm.LMSoftmax(scale=8.0),
    "normface": lm.NormFace(scale=8.0),
    "sphereface": lm.SphereFace(),
    "ldam": lm.LDAM([20] * 10, scale=8.0),
    "gm_softmax": lm.GMSoftmax(scale=8.0),
    "sample_margin": lm.SampleMargin(),
    "unified_margin": lm.UnifiedMargin(scale=8.0),
    "discriminative": lambda c, d: lm.Discriminative(c, d),
}


@pytest.mark.parametrize("name", SILENT_AT_ZERO)
def test_zero_rows_get_values_that_train(name: str) -> None:
    model = zeros()
    given = copy.deepcopy(SILENT_AT_ZERO[name])
    with pytest.warns(
        MarginWarning, match=r"10 of the 10 rows of the head '3' are zero, where \w+"
    ):
        criterion = lm.attach(model, given)
    lengths = criterion.layer.weight.detach().norm(dim=1)
    assert lengths.min() > 0.3
    assert lengths.max() < 2
    images, labels = digits()
    criterion(model(images[:200]), labels[:200]).backward()
    for parameter in (criterion.layer.weight, model[0].weight):
        assert parameter.grad.abs().amax(1).gt(0).sum() >= len(parameter) - 4  # dead ReLUs


def test_processes_of_ddp_draw_the_same() -> None:
    """DDP has copied the weights already; elsewhere the seed of the user decides."""
    drawn = {True: [], False: []}
    for same, found in drawn.items():
        for seed in (1, 2):
            model, objective = zeros(), lm.Objective(face=lm.CosFace())
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            fill_zero_rows(model, "3", model[3], objective, same=same, warn=False)
            assert torch.equal(torch.get_rng_state(), state) == same
            found.append(model[3].weight.detach())
    assert torch.equal(*drawn[True])
    assert not torch.equal(*drawn[False])


def test_only_rows_that_are_zero_are_changed() -> None:
    model = zeros(rows=2)
    kept = model[3].weight.detach()[2:].clone()
    with pytest.warns(MarginWarning, match="2 of the 10 rows"):
        criterion = lm.attach(model, lm.CosFace())
    assert torch.equal(criterion.layer.weight.detach()[2:], kept)
    assert criterion.layer.weight.detach()[:2].norm(dim=1).gt(0.3).all()


@pytest.mark.parametrize(
    "objective",
    [
        lm.CrossEntropy(),
        lm.CrossEntropy() + 0.5 * lm.SampleMargin(),
        lm.MaxHinge(),
        lm.MarginHinge(),
        lambda c, d: lm.GaussianMixture(c, d),
        lambda c, d: lm.CenterLoss(c, d),
    ],
)
def test_zero_rows_that_train_or_need_not_stay(objective: object, recwarn) -> None:  # type: ignore[no-untyped-def]
    model = zeros()
    criterion = lm.attach(model, objective)
    assert not criterion.layer.weight.any()
    assert not recwarn.list


@pytest.mark.parametrize("objective", [lm.MarginHinge(), lm.MarginDistribution(), lm.LayerMargin()])
def test_cosines_with_zero_rows_do_not_train_losses_on_inputs(objective: lm.Loss) -> None:
    model = zeros()
    model[3] = lm.ClassHead(16, 10, similarity="cosine", bias=False)
    nn.init.zeros_(model[3].weight)
    layers = ["1"] if isinstance(objective, lm.LayerMargin) else []
    with pytest.warns(MarginWarning, match="10 of the 10 rows of the head '3' are zero"):
        criterion = lm.attach(model, objective, layers=layers)
    images, labels = digits()
    criterion(model(images[:20]), labels[:20]).backward()
    assert model[0].weight.grad.any()


def test_logits_of_length_zero_do_not_send_the_head_away() -> None:
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    with pytest.warns(
        MarginWarning, match=r"LogitNorm has a gradient of 1e\+08, so the first step"
    ):
        criterion = lm.attach(model, lm.LogitNorm())
    images, labels = digits()
    criterion(model(images[:20].flatten(1)), labels[:20]).backward()
    assert model[2].weight.grad.abs().max() < 1e3


def test_a_head_that_was_set_to_zero_after_attach_is_said() -> None:
    model = zeros(rows=0)
    criterion = lm.attach(model, lm.CosFace())
    nn.init.zeros_(model[3].weight)
    images, labels = digits()
    with pytest.warns(MarginWarning, match="all rows of the head are zero"):
        criterion(model(images[:20]), labels[:20]).backward()
    criterion(model(images[:20]), labels[:20])  # said once


def test_zero_rows_get_values_beside_a_loss_on_noise() -> None:
    model = zeros()
    with pytest.warns(MarginWarning, match="10 of the 10 rows"):
        lm.attach(model, lm.CosFace() + lm.Stability())
    assert model[3].weight.any()


def test_a_zero_weight_that_another_layer_uses_stays() -> None:
    """The row of the padding token of a tied embedding is zero for good reason."""
    model = nn.Sequential(nn.Embedding(10, 16, padding_idx=0), nn.Linear(16, 10, bias=False))
    model[1].weight = model[0].weight
    with pytest.warns(MarginWarning, match="1 of the 10 rows.*left as it is"):
        lm.attach(model, lm.CosFace())
    assert not model[0].weight[0].any()


def test_what_is_refused_keeps_its_zeros_and_loading_fills_none(tmp_path: Path) -> None:
    model = zeros()
    with pytest.raises(lm.LargeMarginError):
        lm.attach(model, lm.CosFace(), schedule=Ramp("nothing", 0.0, steps=3))
    assert not model[3].weight.any()
    silent = zeros()
    criterion = lm.attach(silent, lm.CosFace(), warn=False)
    assert silent[3].weight.any()
    pytest.importorskip("safetensors", reason="needs safetensors")
    lm.export.save(tmp_path / "run", silent, criterion)
    lm.export.load(tmp_path / "run", model)
    assert torch.equal(model[3].weight, silent[3].weight)


def test_torchvisions_vision_transformer_trains() -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(8, 4, 1, 2, 16, 32, num_classes=10)
    assert not model.heads.head.weight.any()
    with pytest.warns(MarginWarning, match=r"the head 'heads\.head' are zero"):
        criterion = lm.attach(model, lm.CosFace(scale=8.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    images, labels = digits()
    images = images.view(-1, 1, 8, 8).expand(-1, 3, -1, -1)[:200]
    values = []
    for _ in range(12):
        value = criterion(model(images), labels[:200])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0] - 0.5


def embeddings(
    rows: int,
    labels: Callable[[torch.Tensor], torch.Tensor],
    watch: Watch | None = None,
    **options: object,
) -> list:
    """What is said of the range of the labels."""
    watch = watch or quick()
    done = Trained(lm.CosFace(scale=8.0), num_classes=rows, labels=labels, watch=watch, **options)
    return [each for each in done.said if "one per class" in each]


def test_an_embedding_network_is_no_classifier() -> None:
    said = embeddings(32, lambda y: y)
    assert len(said) == 1
    assert "the head has 32 rows" in said[0]
    assert "none is above 9" in said[0]
    assert "nn.Sequential(model, lm.ClassHead(32, num_classes=10))" in said[0]


def test_an_embedding_network_is_told_in_one_pass_over_the_digits() -> None:
    """640 samples of 32 rows, in 20 calls."""
    assert len(embeddings(32, lambda y: y, Watch(), calls=20)) == 1


def test_half_as_many_labels_as_rows_are_too_few() -> None:
    assert len(embeddings(20, lambda y: y)) == 1


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (19, lambda y: y),  # more than half
        (10, lambda y: y),
        (32, lambda y: torch.where(y == 9, 31, y)),  # the highest decides
        (32, lambda y: nn.functional.one_hot(y, 32).float()),
        (32, lambda y: torch.full_like(y, -100)),
    ],
)
def test_labels_that_fit_the_head(
    rows: int, labels: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert embeddings(rows, labels) == []


def test_labels_are_judged_by_enough_samples() -> None:
    """64 samples a call: 20 for each of the rows take 40 calls, or 160."""
    assert embeddings(128, lambda y: y, calls=39) == []
    assert embeddings(129, lambda y: y, calls=79) == []
    assert len(embeddings(128, lambda y: y, calls=40)) == 1
    assert len(embeddings(129, lambda y: y, calls=80)) == 1
    calls = iter(range(1000))

    def late(y: torch.Tensor) -> torch.Tensor:  # once in the window before the verdict is enough
        return torch.where(y == 9, 31, y) if next(calls) == 25 else y

    assert embeddings(32, late) == []


def test_batches_without_a_sample_are_no_reason_to_fail() -> None:
    model = nn.Sequential(nn.Linear(3, 8))
    criterion = lm.attach(model, lm.CosFace(), warn=False)
    criterion._watch = quick()
    for _ in range(90):
        criterion(model(torch.zeros(0, 3)), torch.zeros(0, dtype=torch.long))


def test_calls_without_gradients_are_no_training() -> None:
    model = network()
    criterion = lm.attach(model, lm.CosFace())
    criterion._watch = quick()
    images, targets = digits()
    with torch.no_grad():
        for _ in range(3):
            criterion(model(images[:8]), targets[:8])
    assert criterion._watch.calls == 0
    criterion(model(images[:8]), targets[:8])
    assert criterion._watch.calls == 1
