"""The ``largemargin`` command: one file per sub-command, imported when it is used.

A sub-command is a module here with three names: ``HELP``, one line for the list of commands;
``arguments(parser)``, which adds its options to a
:class:`~largemargin.app.cli.parser.CommandParser`; and ``run(options) -> int``, the exit status.
It may have two more, ``DESCRIPTION`` and ``EXAMPLES``, shown before and after the options.
``options`` is what jsonargparse parsed, with dataclasses already made of their options. A package
of its own adds a sub-command by an entry point of the group ``largemargin.commands`` that names
such a module.

Exit status: 0 done, 1 done but the answer is no, 2 wrong input, 130 stopped by Ctrl-C. Wrong input
is a :class:`~largemargin.LargeMarginError`, shown without a traceback. A command that can continue
what Ctrl-C stopped raises ``KeyboardInterrupt("largemargin ... --resume ...")``.
"""

from largemargin.app.cli.command import main

__all__ = ["main"]
