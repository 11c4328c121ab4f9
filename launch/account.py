"""Account: python launch/account.py epsilon | calibrate | plan | verify RUN_DIR | explain. Never imports torch."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() not in (_HERE, _HERE.parent))]

if __name__ == "__main__":
    from accounting.cli import main

    sys.exit(main())
