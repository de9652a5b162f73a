"""``python -m largemargin``: the command, where its script is not on the path."""

import sys

from largemargin.app.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
