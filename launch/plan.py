"""Plan: python launch/plan.py --config ds_configs/demo.json --gpus 8 --memory 80 --tflops 150 --link 25."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.forecast import main

    sys.exit(main())
