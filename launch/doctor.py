"""What this machine lacks for training: python launch/doctor.py [--config my.json]"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.doctor import main

    sys.exit(main())
