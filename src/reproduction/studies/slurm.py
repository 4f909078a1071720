"""Submits the runs of a plan as one SLURM job array, or prints its script for sbatch."""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from reproduction.config import TRAIN
from reproduction.runs.locking import is_held
from reproduction.studies.plan import PlannedRun, Settings
from reproduction.system.errors import PlainError, UserError
from reproduction.system.storage import write_text

GRACE_SECONDS = 120  # between the signal of SLURM and the time limit
NOTHING_LEFT = "nothing to submit: all runs are finished or being trained"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The SLURM resources of each run; None leaves the default of the cluster.

    `devices` processes are spread over `nodes`, each with `cpus` cores. At most `parallel` runs
    train at the same time. `sbatch` has further options, passed on as they are.
    """

    devices: int = 1
    nodes: int = 1
    no_gpu: bool = False
    cpus: int = 8
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    memory: str | None = None
    parallel: int | None = None
    sbatch: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.devices % self.nodes:
            raise UserError(f"nodes={self.nodes}: devices={self.devices} must divide over them")

    @property
    def processes(self) -> int:
        """Processes per node."""
        return self.devices // self.nodes

    @property
    def cores(self) -> int:
        """Cores per node."""
        return self.cpus * self.processes


def array_script(
    study: str, runs: list[PlannedRun], settings: Settings, resources: Resources
) -> str | None:
    """Returns a script with a task for each run that is neither done nor being trained, if any.

    Checks these runs, and raises UserError if one cannot start. The tasks need this folder, the
    runs, their data and Python under the same paths as here.
    """
    from reproduction.studies.runner import prepare

    left = [run for run in runs if not run.is_done() and not is_held(run.folder)]
    if not left:
        return None
    prepare(left, settings, here=False)
    _folder(settings).mkdir(parents=True, exist_ok=True)  # SLURM does not create it for the logs
    return render(study, left, resources, _folder(settings))


def render(study: str, runs: list[PlannedRun], resources: Resources, folder: Path) -> str:
    """Renders the script; tasks write their logs to `folder`."""
    most = "" if resources.parallel is None else f"%{resources.parallel}"
    options = {
        "job-name": study,
        "array": f"0-{len(runs) - 1}{most}",
        "output": str(folder.absolute() / "%x-%A_%a.log"),
        "open-mode": "append",
        "signal": f"B:USR1@{GRACE_SECONDS}",
        "partition": resources.partition,
        "account": resources.account,
        "time": resources.time,
        "mem": resources.memory,
        "nodes": resources.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": resources.cores,
        "gpus-per-node": None if resources.no_gpu else resources.processes,
    }
    flags = [f"--{key}={shlex.quote(str(x))}" for key, x in options.items() if x is not None]
    device = "device=cpu" if resources.no_gpu else "device=cuda"
    environment = Environment(  # noqa: S701 - for bash; all values are quoted
        loader=PackageLoader("reproduction.studies", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("array.sbatch.jinja").render(
        study=study,
        options=[*flags, "--requeue", *resources.sbatch],
        runs=[_shell_line([*run.overrides, device]) for run in runs],
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        train=shlex.quote(str(TRAIN)),
        resources=resources,
        grace=GRACE_SECONDS,
    )


def _shell_line(words: Sequence[str]) -> str:
    """Quotes words for a shell, with double quotes around single ones for readability."""
    quoted = {word: f'"{word}"' for word in words if "'" in word and not set(word) & set('"$`\\!')}
    return " ".join(quoted.get(word) or shlex.quote(word) for word in words)


def print_script(
    study: str, runs: list[PlannedRun], settings: Settings, resources: Resources
) -> None:
    """Prints only the script to stdout; PlainError if nothing is left to submit."""
    with redirect_stdout(sys.stderr):  # messages of downloads
        script = array_script(study, runs, settings, resources)
    if script is None:
        raise PlainError(NOTHING_LEFT)
    print(script, end="")


def submit(study: str, runs: list[PlannedRun], settings: Settings, resources: Resources) -> str:
    """Saves the script and submits it with sbatch; returns a message.

    Raises UserError if sbatch does not exist or refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm: there is no sbatch on this machine")
    script = array_script(study, runs, settings, resources)
    if script is None:
        return NOTHING_LEFT
    path = _folder(settings) / f"{study}-{time.strftime('%Y-%m-%d_%H-%M-%S')}.sbatch"
    write_text(path, script)
    process = subprocess.run(
        ["sbatch", "--parsable", str(path)], stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode != 0:
        raise UserError(f"launcher=slurm: sbatch has refused {path}")
    job = process.stdout.strip().partition(";")[0]
    return (
        f"submitted {path} as job {job}; its tasks write to {path.parent}/{study}-{job}_*.log\n"
        "reproduce.py --status shows their progress; the same command submits unfinished runs again"
    )


def _folder(settings: Settings) -> Path:
    """Returns the folder of scripts and logs."""
    return settings.root / ".slurm"
