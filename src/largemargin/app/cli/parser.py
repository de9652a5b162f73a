"""``CommandParser``: jsonargparse with short usage, plain help texts and errors that help.

It adds three things. Names without ``.name``: ``--data photos/ --model resnet18``. Messages in the
words of this command. And settings are values: jsonargparse builds whatever ``class_path:
os.system`` names, also inside free settings such as ``model.options``, and imports its module to
find out whether it can. That is refused always; ``--trust_config`` allows one thing,
``model.name: package.module.Network``.
"""

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from largemargin.exceptions import LargeMarginError

TRUST = "--trust_config"
CONFIG_FILES = (".yaml", ".yml", ".json")
DATA_FILES = {".csv": "csv", **dict.fromkeys((".npz", ".npy", ".safetensors"), "arrays")}
MOST_SAID = 5000
"""Characters of a message that are looked at: it may repeat a whole file."""
LAYOUTS = ("folder", "csv", "arrays", "huggingface")
"""Ways to keep any images, not data sets with a name."""


class PlainHelp(jsonargparse.DefaultHelpFormatter):
    """Help without type names where the choices or the default say as much."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)  # type: ignore[no-untyped-call]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are filled; lines that start with a space stay as they are."""
        parts = [
            part if part.startswith(" ") or "\n " in part else textwrap.fill(part, width)
            for part in text.strip("\n").split("\n\n")
        ]
        return textwrap.indent("\n\n".join(parts), indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._HelpAction):
            return "show this help and exit"
        if "--print_config" in action.option_strings:
            return "print all settings as YAML, ready for --config, and exit"
        text = (action.help or "").replace("``", "").rstrip(".")
        default = action.default
        said = "default" in text or default is argparse.SUPPRESS or not action.option_strings
        if said or default in (None, (), {}, []):
            return text
        shown = {True: "true", False: "false"}.get(default) if isinstance(default, bool) else None
        return f"{text} (default {shown or default})"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        printed = "--print_config" in action.option_strings
        return "" if printed else super()._format_args(action, default_metavar)


class CommandParser(jsonargparse.ArgumentParser):
    """A parser for one sub-command."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", PlainHelp)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self.usage = f"{self.prog} [options]"
        self.shorthand: tuple[str, ...] = ()
        """Groups with a name, as ``data``, whose name may be given as ``--data NAME``."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **options: Any
    ) -> jsonargparse.Namespace:
        given = sys.argv[1:] if args is None else args
        if {"-h", "--help"} & {*given}:  # before anything that takes seconds to import
            self.print_help()
            self.exit()
        # An option as it is called: --batch-size is --batch_size.
        dashes = re.compile(r"(?<=^--)[^=]+")
        words = [dashes.sub(lambda name: name[0].replace("-", "_"), word) for word in given]
        words = limit_imports(words)
        check_versions(words)
        try:
            words = self._lists(self._whole(expand(words, self.shorthand)))
            return super().parse_args(words, *rest, **options)
        except LargeMarginError:
            raise
        except Exception as error:
            # The former is not public, and not always caught inside; the others are of values.
            own = type(error).__name__ == "ImportDenied"
            if not own and not isinstance(error, ValueError | ArithmeticError | RecursionError):
                raise
            self.error(str(error))

    def _whole(self, words: Sequence[str]) -> list[str]:
        """Names without their group, where one setting alone is called so: ``--lr 0.1``."""
        known = [name for action in self._actions for name in action.option_strings]
        ends = [name.rpartition(".")[2] for name in known]
        whole = {
            f"--{end}": name
            for end, name in zip(ends, known, strict=True)
            if ends.count(end) == 1 and f"--{end}" not in known and "." in name
        }
        parts = (word.partition("=") for word in words)
        return ["".join((whole.get(name, name), *rest)) for name, *rest in parts]

    def _options_of_lists(self) -> set[str]:
        every = [each for each in self._actions if "tuple[" in str(getattr(each, "_typehint", ""))]
        return {name for action in every for name in action.option_strings}

    def _lists(self, words: Sequence[str]) -> list[str]:
        """Write out lists typed plainly: ``--trackers wandb mlflow`` is ``[wandb,mlflow]``."""
        lists = self._options_of_lists()
        # Where a command has words of its own, one word of a list follows its option.
        alone = all(action.option_strings for action in self._actions)
        long: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            option, equals, value = word.partition("=")
            if option not in lists:
                long.append(word)
                continue
            given = [value]
            if not equals:
                given = list(itertools.takewhile(lambda each: not each.startswith("--"), rest))
                given = given if alone else given[:1]
                del rest[: len(given)]
            value = ",".join(given)
            if value and value[0] not in "[{&*'\"" and value != "null":
                value = f"[{value}]"
            long.append(f"{option}={value}" if given else option)
        return long

    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        # `--data CONFIG`, which jsonargparse adds to every group of options.
        hidden = [each for each in self._actions if type(each).__name__ == "_ActionConfigLoad"]
        kept = [(action, action.help) for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help(formatter)
        finally:
            for action, text in kept:
                action.help = text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        sys.stderr.write(f"usage: {self.usage}    ({self.prog} --help shows them)\n")
        sys.stderr.write(f"error: {self._explained(message)}\n")
        sys.exit(2)

    def _explained(self, message: str) -> str:
        """The message in plain words, with what was probably meant."""
        message = _readable(message[:MOST_SAID]).replace(
            "as LIST,", f"as {self._list_of(message)},"
        )
        in_file = not message.startswith("unrecognized")
        close = self._meant(message)
        if in_file and (_unknown_option(message) or "parsing config" in message):
            files = ", ".join(config_files(getattr(self, "args", [])))
            message = f"{files}: {message}" if files else message
        if not close:
            return message
        meant = [name.removeprefix("--") for name in close] if in_file else close
        return f"{message}. Did you mean {' or '.join(meant)}?"

    def _meant(self, message: str) -> list[str]:
        """Options that may have been meant by one that a message calls unknown."""
        names = [text for action in self._actions for text in action.option_strings]
        if (alone := re.fullmatch(r"unrecognized arguments: ([^-\s]\S*)", message)) is not None:
            return [f"--data {alone[1]}"] if "--data" in names else []
        wrong = _unknown_option(message)
        return _closest(wrong, names) if wrong else []

    def _list_of(self, message: str) -> str:
        """How a list is written for the option that a message is about: of names, or numbers."""
        found = re.search(r"Parser key \"([\w.]+)\"", message)
        kinds = [
            str(getattr(action, "_typehint", ""))
            for action in self._actions
            if found is not None and action.dest == found[1]
        ]
        return "[a,b]" if any("tuple[str" in kind for kind in kinds) else "[1,2]"


def limit_imports(words: Sequence[str]) -> list[str]:
    """Set what may be imported for these words; returns them without the option."""
    from jsonargparse import _loaders_dumpers as loaders

    from largemargin.app.models.library_networks import trust
    from largemargin.app.training.config_file import bounded

    if loaders.yaml_default_loader is None:  # it has no public way to choose one
        plain: Any = loaders.get_yaml_default_loader  # without types
        loaders.yaml_default_loader = bounded(plain())
    jsonargparse.set_parsing_settings(
        import_path_denylist=["*"],
        # A class path in a free setting is an error, not a value to pass on.
        validate_subclass_spec_in_any=True,
        instantiate_subclass_spec_in_any=False,
    )
    trust(TRUST in words)
    return [word for word in words if word != TRUST]


def check_versions(words: Sequence[str]) -> None:
    """Refuse files of a newer version by that, not by the first setting that is unknown here."""
    from largemargin.app.training.config_file import read_yaml
    from largemargin.app.training.files import CONFIG, check_version

    for file in config_files(words):
        if Path(file).is_file():
            check_version(read_yaml(file), CONFIG, file)


def config_files(words: Sequence[str]) -> Iterator[str]:
    """What stands after ``--config``."""
    yield from (after for word, after in itertools.pairwise(words) if word == "--config")
    yield from (word.partition("=")[2] for word in words if word.startswith("--config="))


def expand(words: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Write out what stands for more: ``--model resnet18`` is ``--model.name resnet18``.

    ``--data`` also takes what the images lie in: a folder (``folder``), a CSV file (``csv``) or an
    array file (``arrays``). The name of a data set is that data set, unless a folder of that name
    lies here and holds images; which was taken is said then. YAML files and ``{...}`` stay what
    they are for jsonargparse, the settings of the whole group.

    Example:
        >>> expand(["--model", "resnet18", "--epochs=3"], ["model"])
        ['--model.name=resnet18', '--epochs=3']
    """
    long: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        group = option.removeprefix("--")
        if not option.startswith("--") or group not in groups or not (equals or rest):
            long.append(word)
            continue
        value = value if equals else rest.pop(0)
        long += _written_out(group, value)
    return long


def _written_out(group: str, value: str) -> list[str]:
    if value.lower().endswith(CONFIG_FILES) or value.startswith("{"):
        return [f"--{group}={value}"]
    if group == "data" and (kind := _stored_as(value)) is not None:
        return [f"--data.name={kind}", f"--data.path={value}"]
    return [f"--{group}.name={value}"]


def _stored_as(value: str) -> str | None:
    """What ``--data`` names: a folder, csv or arrays; None for the name of a data set."""
    path = Path(value).expanduser()
    written_as_path = any(mark in value for mark in "/\\~")
    if path.is_dir():
        return None if not written_as_path and _is_data_set(value, path) else "folder"
    if not path.suffix and written_as_path:
        return "folder"
    return DATA_FILES.get(path.suffix.lower())


def _is_data_set(name: str, folder: Path) -> bool:
    """Whether the name of this folder means the data set that is called so; either way it says."""
    from largemargin.app.data.sources import SOURCES
    from largemargin.app.data.sources.image_folders import holds_images

    if name not in SOURCES or name in LAYOUTS:
        return False
    if holds_images(folder):
        print(
            f"--data {name}: the images in the folder {name} here are taken. For the data set of "
            f"that name write --data.name {name}.",
            file=sys.stderr,
        )
        return False
    print(
        f"--data {name}: the data set is taken, not the folder {name} here, which holds no images. "
        f"For the folder write ./{name}.",
        file=sys.stderr,
    )
    return True


def _unknown_option(message: str) -> str | None:
    """The option jsonargparse does not know, with its dashes."""
    for pattern in (
        r"unrecognized .*?--([\w.]+)",
        r"Group '([\w.]+)' does not accept option '([\w.]+)'",
        r"Option '([\w.]+)' is not accepted",
    ):
        if found := re.search(pattern, message):
            return f"--{'.'.join(found.groups())}"
    return None


CALLED = {
    "learning_rate": "lr",
    "loss": "objective",
    "criterion": "objective",
    "dataset": "data",
    "arch": "model",
    "pretrained": "weights",
    "num_workers": "workers",
    "gpu": "device",
    "freeze_backbone": "freeze",
    "mixup_alpha": "mixup",
    "cutmix_alpha": "cutmix",
    "smoothing": "label_smoothing",
    "lr_find": "lr_range_test",
    "lr_finder": "lr_range_test",
    "tta": "flips",
    "report_to": "trackers",
    "wandb": "trackers",
    "tensorboard": "trackers",
    "mlflow": "trackers",
}
"""What others call an option, and its name here."""
OF_LOSSES = ("margin", "scale", "strength")


def _closest(word: str, names: Sequence[str]) -> list[str]:
    end = word.removeprefix("--").rpartition(".")[2]
    if end in OF_LOSSES and "--objective.settings" in names:
        return [f"--objective.settings.{end}"]
    # `--lr` means `--optimizer.lr`: the end of a name is how people remember it.
    ends = [each for each in names if re.split(r"\.|--", each)[-1] == CALLED.get(end, end)]
    if ends and end in CALLED:
        return ends[:1]
    close = get_close_matches(word, names, n=3, cutoff=0.7)
    return list(dict.fromkeys([*ends, *close]))[:3]


READABLE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"Parser key \"([\w.]+)\":\s*", r"\1: "),
    (
        r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S+)",
        r"\2 was given, but one of \1 is expected.",
    ),
    (r"Expected a <class 'int'>\. Got value: (.*)", r"a whole number is expected, not \1."),
    (r"Expected a <class 'float'>\. Got value: (.*)", r"a number is expected, not \1."),
    (r"Expected a <class 'bool'>\. Got value: (.*)", r"true or false is expected, not \1."),
    (r"Expected a <class 'tuple'>\. Got value: (.*)", r"a list is expected, as LIST, not \1."),
    (r"Expected a <class 'dict'>\. Got value: (.*)", r"settings are expected, as {a: 1}, not \1."),
    (
        r"Does not validate against any of the Union subtypes\s+Subtypes: \[(.*?)\]\s+Errors:.*"
        r"Given value: (.*)",
        lambda found: f"{_kinds(found[1])} is expected, not {found[2]}.",
    ),
    (r"Problems parsing config: ", r"problems parsing config, which must be YAML: "),
    (
        r".*?Importing '([\w.]+)' is not allowed.*",
        r"class_path \1 is refused: settings are values, and building a class that a file names "
        "would run code.",
    ),
)
"""jsonargparse's messages, and what is said instead."""
KINDS = {"int": "a whole number", "float": "a number", "str": "text", "NoneType": "null"}


def _readable(message: str) -> str:
    for pattern, instead in READABLE:
        message = re.sub(pattern, instead, message, flags=re.DOTALL)
    return message.strip()


def _kinds(types: str) -> str:
    """``<class 'float'>, <class 'NoneType'>`` as words."""
    found = re.findall(r"<class '(\w+)'>|(tuple)\[|typing\.Literal\[(.*?)\]", types)
    names = [name or options or "a list, as LIST," for name, _, options in found]
    return " or ".join(KINDS.get(name, name) for name in names) or types
