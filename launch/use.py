"""Use a trained model: python launch/use.py EXPORT PICTURE... prints captions, classes or features."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.use import main

    sys.exit(main())
