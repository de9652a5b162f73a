"""How the library is installed: what Makefile, Dockerfile and the documents name is there."""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STAMP = "$(VENV)/.installed"


def instructions(name: str) -> list[list[str]]:
    """The words of every line of the Dockerfile that begins with this one."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [shlex.split(rest) for word, rest in lines if word == name]


def needs(target: str) -> list[str]:
    (found,) = re.findall(rf"(?m)^{re.escape(target)}:(.*)$", MAKEFILE)
    return list(found.split())


def recipe(target: str) -> str:
    (found,) = re.findall(rf"(?m)^{re.escape(target)}:.*\n((?:\t.*\n)+)", MAKEFILE)
    return str(found)


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "docs/index.md", ".ci/run"])
def test_every_make_target_that_is_named_exists(file: str) -> None:
    named = re.findall(r"(?m)(?:^|`)make ((?:[a-z-]+ ?)+)", (ROOT / file).read_text("utf-8"))
    targets = {target for words in named for target in words.split()}
    assert targets
    for target in targets:
        assert re.search(rf"(?m)^{target}:", MAKEFILE), target


def test_the_demo_does_not_wait_for_the_tools_of_developers() -> None:
    assert needs("demo") == [f"{STAMP}-demo"]
    assert "'.[report]'" in recipe(f"{STAMP}-demo")
    assert "largemargin[train]" in EXTRAS["report"]
    for target in ("test", "test-all", "check", "docs", "conformance", "mutants"):
        assert needs(target) == [STAMP], target
    assert needs(STAMP)[0] == f"{STAMP}-demo"
    assert "'.[dev]' --editable papers" in recipe(STAMP)


@pytest.mark.parametrize("stamp", [f"{STAMP}-demo", STAMP])
def test_what_is_installed_is_announced_with_time_and_size(stamp: str) -> None:
    text = recipe(stamp)
    said = text.index("@echo")
    assert said < text.index("pip install")
    assert re.search(r"once: \d+ minutes and \d+ GB", text[said:])


def test_classifiers_name_pythons_that_may_be_used() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert named == ["3.11", "3.12"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    (image,) = instructions("FROM")
    assert image == [f"python:{named[-1]}-slim"]


def test_the_container_copies_what_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = [source for *sources, _ in instructions("COPY") for source in sources]
    assert sorted(copied) == sorted(let_in)
    for source in copied:
        assert (ROOT / source).exists(), source
        kept_out = [rule for rule in rules[1:] if not rule.startswith("!")]
        assert not any(fnmatch.fnmatch(source, rule.removeprefix("**/")) for rule in kept_out)
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "src"}
    assert needed <= set(copied)


def test_the_container_installs_and_runs_what_exists() -> None:
    from largemargin.app.cli.command import COMMANDS

    first, second, _ = (" ".join(words) for words in instructions("RUN"))
    least = {*PROJECT["dependencies"], *EXTRAS["train"]}
    named = set(re.findall(r"torch[a-z]*>=[0-9.]+", first))
    assert len(named) == 2
    assert named <= least
    (extra,) = re.findall(r"/source\[(\w+)\]", second)
    assert extra in EXTRAS
    (entry,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    assert [entry, command] == [["[largemargin]"], ["[demo]"]]
    assert {"largemargin"} == set(PROJECT["scripts"])
    assert "demo" in COMMANDS


def test_the_documents_start_the_container_as_the_dockerfile_says() -> None:
    page = (ROOT / "docs" / "how-to" / "command_line.md").read_text(encoding="utf-8")
    said = re.findall(r"(?m)^# {3}((?:docker|mkdir) .*)$", DOCKERFILE)
    assert len(said) == 4
    for command in said:
        assert command in page, command


def test_what_waits_for_the_release_is_marked_so() -> None:
    for file in ("README.md", "pyproject.toml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        hidden = re.sub(r"(?s)<!-- On release.*?-->|(?m:^#.*$)", "", text)
        assert "OWNER" in text
        assert not re.search("OWNER|shields.io|pip install largemargin", hidden), file
