"""Train: deepspeed launch/train.py --config ds_configs/demo.json (torchrun and plain python work too)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.train import main

    sys.exit(main())
