"""``python -m solver_shard`` is the command line."""

from __future__ import annotations

from solver_shard.cli import run

if __name__ == "__main__":
    run()
