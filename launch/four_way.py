"""Four-way study (NOT PRIVATE): see python launch/four_way.py --help; deepspeed and torchrun work, too."""

import sys
from pathlib import Path

# Python puts this folder first on the path, where launch/train.py would shadow the package `train`.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() not in (_HERE, _HERE.parent))]

if __name__ == "__main__":
    from train.four_way_app import main

    sys.exit(main())
