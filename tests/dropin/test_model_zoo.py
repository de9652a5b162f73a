"""Architectures people train, through attach with three kinds of losses: the table of the docs.

A few quick ones in the fast suite; all of them in the slow one.
"""

import pytest
from dropin.model_zoo import CHECKS, LOSSES, examine, zoo

# timm's own names are deprecated one after the other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

EXAMPLES = zoo()
QUICK = ("torchvision/vit", "timm/resmlp_12_224", "transformers/GPT2", "torchvision/squeezenet")
KNOWN: dict[tuple[str, str], set[str]] = {}
"""What does not hold, as the table says, too."""


def check(name: str, loss: str) -> None:
    found = examine(EXAMPLES[name], loss)
    if EXAMPLES[name].refused:
        assert found["refused"]
        return
    assert found.keys() == CHECKS.keys()
    failed = {check for check, held in found.items() if held is False}
    assert failed <= KNOWN.get((name, loss), set())


@pytest.mark.parametrize("name", QUICK)
def test_some_models_with_a_cosine_loss(name: str) -> None:
    check(name, "cosine")


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_models(name: str, loss: str) -> None:
    check(name, loss)


def test_the_zoo_holds_what_the_table_promises() -> None:
    of = [name.split("/")[0] for name in EXAMPLES]
    assert of.count("torchvision") == 21  # every family of its classification models
    assert of.count("timm") >= 25
    assert of.count("transformers") >= 12
