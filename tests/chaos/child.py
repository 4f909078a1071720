"""Runs train.py without figures and logs its steps: child FILE [train.py arguments].

FILE.RANK gets a line with the process and its completed steps after each step.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from reproduction.config import CONF_DIR
from reproduction.reporting import report
from reproduction.training.loop import Trainer


def main() -> None:
    log, train_step = Path(f"{sys.argv[1]}.{os.environ.get('RANK', '0')}"), Trainer.train_step

    def logging(self: Trainer, *args: Any) -> Any:
        parts = train_step(self, *args)
        with log.open("a") as file:
            file.write(f"{os.getpid()} {self.step + 1}\n")
        return parts

    setattr(Trainer, "train_step", logging)
    setattr(report, "_draw", lambda folder, config: [])  # drawing takes longer than these runs
    train = str(CONF_DIR.parent / "train.py")
    sys.argv = [train, *sys.argv[2:]]
    runpy.run_path(train, run_name="__main__")


if __name__ == "__main__":
    main()
