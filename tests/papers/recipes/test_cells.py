"""Settings of a recipe's runs: merged, shortened and named."""

from largemargin_papers.recipes.cells import merge, nested, run_name, shortened

from largemargin.app.training import NoiseConfig, OptimizerConfig, RunConfig


def test_shortened_runs_keep_the_shape_of_their_schedule() -> None:
    config = RunConfig(
        epochs=200, optimizer=OptimizerConfig(milestones=(60, 120, 160), warmup_epochs=10)
    )
    short = shortened(config, 0.1)
    assert short.epochs == 20
    assert short.optimizer.milestones == (6, 12, 16)
    assert short.optimizer.warmup_epochs == 1.0
    tiny = shortened(config, 0.001)
    assert (tiny.epochs, tiny.optimizer.milestones) == (1, (1,))
    assert shortened(config, 1.0) is config


def test_names_of_runs_depend_on_what_decides_the_result() -> None:
    plain = RunConfig()
    assert run_name(plain) == run_name(RunConfig(device="cuda", out="elsewhere", name="x"))
    assert run_name(plain) != run_name(RunConfig(seed=1))
    assert run_name(plain) != run_name(RunConfig(optimizer=OptimizerConfig(lr=0.1)))
    assert run_name(plain) != run_name(RunConfig(noise=NoiseConfig(joined=True)))


def test_settings_merge_group_by_group() -> None:
    settings = nested({"objective": {"name": "a", "settings": {"x": 1}}, "data.name": "mnist"})
    merge(settings, nested({"objective.settings.y": 2, "data": {"size": 8}}))
    assert settings == {
        "objective": {"name": "a", "settings": {"x": 1, "y": 2}},
        "data": {"name": "mnist", "size": 8},
    }
    merge(settings, nested({"objective.name": "b"}))
    assert settings["objective"] == {"name": "b"}
    merge(settings, {"data": "digits"})  # no group: whoever reads the settings says so
    assert settings["data"] == "digits"


def test_options_belong_to_the_network_they_were_given_for() -> None:
    settings = nested({"model": {"name": "resnet18", "options": {"initial": "torch"}}})
    merge(settings, nested({"model.name": "resnet18", "model.feature_dim": 30}))
    assert settings["model"]["options"] == {"initial": "torch"}
    merge(settings, nested({"model.name": "small_cnn", "model.options": {"width": 4}}))
    assert settings["model"] == {"name": "small_cnn", "feature_dim": 30, "options": {"width": 4}}
