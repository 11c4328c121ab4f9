"""Retire: python launch/retire.py RUN_DIR certifies what a run has spent and destroys its key."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.retire import main

    sys.exit(main())
