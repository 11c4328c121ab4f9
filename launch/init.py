"""Write a first config for your own data: python launch/init.py classify --data my-shards --out my.json"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project
    from murmuration.train.commands.init import main

    sys.exit(main())
