"""What is asked of a configuration file before its settings are read: may it, can it.

jsonargparse builds whatever ``class_path: os.system`` names, also inside free settings such as
``model.options``, and imports its module to find out whether it can. Settings are values here, so
that is refused always. ``--trust_config`` allows one thing: ``model.name: package.module.Network``.
"""

import itertools
from collections.abc import Iterator, Sequence

import jsonargparse

TRUST = "--trust_config"


def limit_imports(words: Sequence[str]) -> list[str]:
    """Set what may be imported for these words; returns them without the option."""
    from largemargin.models.by_path import trust

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
    from largemargin.errors import LargeMarginError
    from largemargin.training.config_file import read_yaml
    from largemargin.training.versions import CONFIG, check_version

    for file in config_files(words):
        try:
            read = read_yaml(file)
        except LargeMarginError:  # jsonargparse names the line
            continue
        check_version(read, CONFIG, file)


def config_files(words: Sequence[str]) -> Iterator[str]:
    """What stands after ``--config``."""
    yield from (after for word, after in itertools.pairwise(words) if word == "--config")
    yield from (word.partition("=")[2] for word in words if word.startswith("--config="))
