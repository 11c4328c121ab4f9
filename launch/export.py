"""Export: python launch/export.py RUN_DIR OUT writes the weights and their certificate, and never the run key."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.export import main

    sys.exit(main())
