"""A sweep that a test kills: the first point is solved, every other one says its process and then takes for ever.

python sweep_script.py FOLDER MODEL
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from solver_shard.analysis.sweep import run, sweep

MESHES = ("4", "2,2", "d0=1,d1=4")


def main() -> None:
    folder, model = sys.argv[1:]
    plan_program = run.plan_program

    def slow(*arguments: Any, **options: Any) -> Any:
        if str(options["mesh"]) != "d0=4":
            (Path(folder).parent / f"running-{os.getpid()}").touch()
            time.sleep(600)
        return plan_program(*arguments, **options)

    run.plan_program = slow  # type: ignore[assignment]  # what the points' processes call
    sweep(model, meshes=MESHES, folder=folder, jobs=1, work_limit=0.5, time_limit=3000.0)


if __name__ == "__main__":
    main()
