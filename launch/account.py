"""python launch/account.py epsilon | calibrate | plan | verify RUN_DIR | explain | statement. Never imports torch."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.accounting.cli.main import main

    sys.exit(main())
