"""Evaluate: python launch/evaluate.py probe|few-shot|zero-shot|caption|... WHAT ..., or compare RESULT..."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.evaluate import main

    sys.exit(main())
