"""The page of architectures: made from recorded results, failures included."""

import make_models


def test_the_page_is_made_from_the_committed_results() -> None:
    made = make_models.page(make_models.read())
    assert made == make_models.PAGE.read_text(encoding="utf-8"), "run python docs/make_models.py"


def every(row: dict[str, object]) -> dict[str, object]:
    return {"layer": None, **dict.fromkeys(make_models.LOSSES, row)}


def test_failures_stay_in_the_table() -> None:
    held = {"gradients": True, "falls": True}
    results = {
        "date": "2026-01-01",
        "versions": {"torch": "2"},
        "checks": {"gradients": "they reach the first layer", "falls": "it falls"},
        "models": {
            "a": {
                "layer": "fc",
                "cosine": held,
                "logits": {**held, "falls": False},
                "centroids": held,
            },
            "b": every({"refused": "no linear layer"}),
            "c": every({"error": "KeyError: x"}),
            "d": every({**held, "falls": "not here"}),
        },
    }
    text = make_models.page(results)
    assert "Of 4 architectures all that applies held for 1; 1 have no" in text
    assert "| a | `fc` | 2 of 2 | 1 of 2; **no falls** | 2 of 2 |" in text
    assert "| b |  | refused | refused | refused |" in text
    assert "| c |  | **KeyError** | **KeyError** | **KeyError** |" in text
    assert "- c, `CosFace`: KeyError: x" in text
    assert "| d |  | 1 of 2; falls: not here |" in text
