"""The command line: `kiln`, or `python -m kiln`."""

from __future__ import annotations

import signal
import sys

from . import _kiln


def main() -> None:
    """Runs the command line with the arguments of this process, and ends it."""
    # Ctrl-C means to it what it means to the program without Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_kiln.command_line(["kiln", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
