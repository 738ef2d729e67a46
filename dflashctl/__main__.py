"""Entry point of the script: says which extra to install where the command line's own packages are missing."""

from __future__ import annotations

import importlib.util
import sys

from dflashctl import interrupt


def main() -> int:
    """Exit code of one command."""
    try:
        interrupt.guard()
        missing = [
            name for name in ("typer", "yaml", "boto3", "pyarrow", "numpy") if importlib.util.find_spec(name) is None
        ]
        if missing:
            print(f"error: {', '.join(missing)} not installed\nhint: pip install 'dflashctl[cli]'", file=sys.stderr)
            return 1
        from dflashctl.cli import main as run

        return interrupt.leave(run())
    except KeyboardInterrupt:  # while modules were loaded
        print(interrupt.WORDS, file=sys.stderr)
        return interrupt.leave(interrupt.CODE)


if __name__ == "__main__":
    sys.exit(main())
