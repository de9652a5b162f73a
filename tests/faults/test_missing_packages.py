"""Without its optional packages the library says which to install; the core needs torch alone."""

import json
import subprocess
import sys

from app.cli.command import environment
from faults.counting import Faults
from faults.extras import EXTRAS, MODEL, OPTIONAL

CHILD = """
import importlib.machinery, json, sys, warnings
warnings.simplefilter("ignore")  # torch tells that there is no NumPy
hidden = set(json.loads(sys.argv[1]))

class Path(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            return None
        return super().find_spec(name, path, target)

at = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[at] = Path
said = {}
for label, code in json.load(sys.stdin).items():
    try:
        exec(code, {})
        said[label] = "it worked"
    except (ImportError, ValueError) as error:
        said[label] = str(error)
        if not isinstance(error, ImportError) or not isinstance(error, ValueError):
            said[label] = f"{type(error)} is no MissingPackage: {error}"
print("SAID " + json.dumps(said))
"""
CORE = (
    MODEL
    + """
criterion = lm.attach(model, lm.CosFace())
criterion(model(images), labels).backward()
geometry = lm.measure(model, [(images, labels)], progress=False)
geometry.save(place + "/geometry.json")
assert lm.Geometry.load(place + "/geometry.json") == geometry
import inspect
assert "measure" in dict(inspect.getmembers(lm))  # help(lm) asks for all that dir(lm) names
exec("from largemargin import *", {})
"""
)


def said_by(snippets: dict[str, str], hidden: tuple[str, ...], python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", CHILD, json.dumps(hidden)],
        input=json.dumps(snippets),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert "SAID " in done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.partition("SAID ")[2])
    return {**found, "stderr": done.stderr}


def test_what_is_missing_is_named_with_its_extra(faults: Faults) -> None:
    snippets = {label: code for label, (_, code) in EXTRAS.items()}
    found = said_by({**snippets, "core": CORE}, OPTIONAL, sys.executable)
    assert found["core"] == "it worked"
    for label, (extra, _) in EXTRAS.items():
        faults.attempt("an optional package that is missing")
        text = found["stderr"] if label == "command" else found[label]
        assert f"pip install 'largemargin[{extra}]'" in text, f"{label}: {text}"
