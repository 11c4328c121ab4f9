"""Train: deepspeed launch/train.py --config ds_configs/demo.json (torchrun and plain python work too)."""

import sys
from pathlib import Path

# Python puts this folder first on the path, where this very file would shadow the package `train`.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() not in (_HERE, _HERE.parent))]

if __name__ == "__main__":
    from train.app import main

    sys.exit(main())
