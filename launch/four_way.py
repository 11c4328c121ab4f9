"""Four-way study (NOT PRIVATE): see python launch/four_way.py --help; deepspeed and torchrun work, too."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.four_way import main

    sys.exit(main())
