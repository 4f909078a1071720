"""The runs of a plan as one SLURM job array: a script for sbatch, and its submission."""

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

from reproduction.runs.locking import is_held
from reproduction.studies.plan import PlannedRun, Settings
from reproduction.system.errors import PlainError, UserError
from reproduction.system.storage import write_text

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
GRACE_SECONDS = 120  # between SLURM's warning and the time limit
NOTHING_LEFT = "nothing is left to submit: every run is finished or in work"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What every run asks SLURM for; None: as the cluster gives it.

    `devices` processes are spread over `nodes`, each with `cpus` cores. At most `parallel` runs
    work at the same time. `sbatch` are further options of its own as they are typed.
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
        """On each node."""
        return self.devices // self.nodes

    @property
    def cores(self) -> int:
        """On each node."""
        return self.cpus * self.processes


def array_script(
    study: str, runs: list[PlannedRun], settings: Settings, resources: Resources
) -> str | None:
    """A script for sbatch: an array task for each run that is neither done nor in work, if any is.

    Checks these runs, and raises UserError for what keeps one from starting. The tasks find this
    folder, the runs, their data and Python where they are here.
    """
    from reproduction.studies.runner import may_train, prepare

    left = [run for run in runs if may_train(run) and not is_held(run.folder)]
    if not left:
        return None
    prepare(left, settings, here=False)
    _folder(settings).mkdir(parents=True, exist_ok=True)  # for the tasks' output, SLURM makes none
    return render(study, left, resources, _folder(settings))


def render(study: str, runs: list[PlannedRun], resources: Resources, folder: Path) -> str:
    """The script; what the tasks print goes to the folder."""
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
    written = [f"--{key}={shlex.quote(str(x))}" for key, x in options.items() if x is not None]
    device = "device=cpu" if resources.no_gpu else "device=cuda"
    environment = Environment(  # noqa: S701 - a script for bash, whose values are quoted above
        loader=PackageLoader("reproduction.studies", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("array.sbatch.jinja").render(
        study=study,
        options=[*written, "--requeue", *resources.sbatch],
        runs=[_line([*run.overrides, device]) for run in runs],
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        train=shlex.quote(str(TRAIN)),
        resources=resources,
        grace=GRACE_SECONDS,
    )


def _line(words: Sequence[str]) -> str:
    """As a shell reads it back; what Hydra has quoted stays readable."""
    quoted = {word: f'"{word}"' for word in words if "'" in word and not set(word) & set('"$`\\!')}
    return " ".join(quoted.get(word) or shlex.quote(word) for word in words)


def print_script(
    study: str, runs: list[PlannedRun], settings: Settings, resources: Resources
) -> None:
    """Prints the script, and nothing else; PlainError if nothing is left to submit."""
    with redirect_stdout(sys.stderr):  # of downloads
        script = array_script(study, runs, settings, resources)
    if script is None:
        raise PlainError(NOTHING_LEFT)
    print(script, end="")


def submit(study: str, runs: list[PlannedRun], settings: Settings, resources: Resources) -> str:
    """Gives the script, which is kept, to sbatch; returns what to tell.

    Raises UserError if there is no SLURM or it refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm: there is no sbatch on this machine")
    script = array_script(study, runs, settings, resources)
    if script is None:
        return NOTHING_LEFT
    path = _folder(settings) / f"{study}-{time.strftime('%Y-%m-%d_%H-%M-%S')}.sbatch"
    write_text(path, script)
    ended = subprocess.run(
        ["sbatch", "--parsable", str(path)], stdout=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode != 0:
        raise UserError(f"launcher=slurm: sbatch has refused {path}")
    job = ended.stdout.strip().partition(";")[0]
    return (
        f"submitted {path} as job {job}; its tasks print to {path.parent}/{study}-{job}_*.log\n"
        "`make status` shows how far the runs are; the same command submits what is left again"
    )


def _folder(settings: Settings) -> Path:
    """Of scripts and of what their tasks print."""
    return settings.root / ".slurm"
