"""Publish a run's public curves: python launch/track.py runs/my --to mlflow (or wandb)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.track import main

    sys.exit(main())
