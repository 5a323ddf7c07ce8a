"""``python -m solver_shard`` is the command line."""

import sys

from solver_shard.cli import main

if __name__ == "__main__":
    sys.exit(main())
