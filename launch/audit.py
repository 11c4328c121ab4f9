"""Audit: deepspeed launch/audit.py --config ds_configs/demo.json --canaries 2000 (plain python works too)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.audit import main

    sys.exit(main())
