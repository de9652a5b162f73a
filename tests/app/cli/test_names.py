"""The same thing has the same name in all functions that take it, and on the command line."""

import inspect
from types import ModuleType
from typing import get_args, get_origin

import pytest

import largemargin as lm
from largemargin.app.cli.command import commands, parser_of
from largemargin.measuring import CurvatureSettings

ROOMS = (lm, lm.measuring, lm.geometry)
NOT_SO = {
    "merge": "sync",
    "reduce": "sync",
    "samples": "max_samples",
    "limit": "max_samples",
    "num_draws": "draws",
    "names_of_classes": "class_names",
    "show_progress": "progress",
    "strangers": "ood",
}
"""Names that were or could be used beside the one on the right."""


def arguments(signature: inspect.Signature) -> set[str]:
    """Names of all arguments, those of ``**options: Unpack[SomeOptions]`` among them."""
    names = set(signature.parameters)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and get_origin(parameter.annotation):
            names |= set(get_args(parameter.annotation)[0].__annotations__)
    return names


def functions(room: ModuleType) -> list[tuple[str, inspect.Signature]]:
    found = [(name, getattr(room, name)) for name in room.__all__]
    return [(name, inspect.signature(each)) for name, each in found if inspect.isfunction(each)]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_siblings_call_the_same_thing_alike(room: ModuleType) -> None:
    for name, signature in functions(room):
        if name == "wilson":
            continue  # `right` of `samples`: numbers, not a limit
        for argument in arguments(signature):
            assert argument not in NOT_SO, f"{name}({argument}=) is {NOT_SO.get(argument)}"
        for argument, parameter in signature.parameters.items():
            words = str(parameter.annotation)
            if argument == "classes":
                assert "str" not in words, f"{name}: names of classes are class_names"
            if argument == "data":
                assert "str" not in words, f"{name}: words about data are data_name"
            if argument == "directions":
                assert "Tensor" in words, f"{name}: a number of them is num_directions"


def test_functions_of_whole_models_share_their_options() -> None:
    takes = {name: arguments(signature) for room in ROOMS for name, signature in functions(room)}
    everywhere = ("measure", "evaluate", "accuracy_of", "attacked_accuracy", "detect_ood")
    for name in everywhere:
        assert {"sync", "progress", "device"} <= takes[name], name
    for name in ("measure", "embed", "attacked_accuracy", "measure_curvature", "embed_arrays"):
        assert "max_samples" in takes[name], name
    for name in ("measure", "measure_arrays", "evaluate", "predict"):
        assert "class_names" in takes[name], name
    assert {"num_directions", "draws"} <= set(CurvatureSettings.__dataclass_fields__)


@pytest.mark.parametrize("command", sorted(commands()))
def test_options_are_written_with_underscores(command: str) -> None:
    for action in parser_of(command)._actions:
        for option in action.option_strings:
            assert "-" not in option.lstrip("-"), option


def test_commands_and_functions_share_names() -> None:
    options = {name: parser_of(name).format_help() for name in ("measure", "report")}
    assert all("--max_samples" in each for each in options.values())
    assert "--num_directions" in options["measure"]


def test_measure_has_the_defaults_of_the_settings_of_curvature() -> None:
    """Which it cannot ask before torch is imported."""
    given, plain = parser_of("measure").get_defaults(), CurvatureSettings()
    for name in ("num_directions", "step", "draws", "sigma"):
        assert given[name] == getattr(plain, name), name
    assert {given.noise} == set(plain.noise.values())
    assert 2 * given.radius == plain.radius


def test_dashes_in_options_are_understood() -> None:
    """People who type --batch-size mean --batch_size; values stay as they are."""
    parser = parser_of("train")
    options = parser.parse_args(["--data=digits", "--batch-size", "7", "--name=a-b"])
    assert (options.batch_size, options.name) == (7, "a-b")
    assert parser.parse_args(["--checkpoint-every=3"]).checkpoint_every == 3
