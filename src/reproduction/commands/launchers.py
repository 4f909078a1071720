"""What Hydra's launchers need: their plugins, runs that go on when started again, GPUs."""

import re
from importlib.util import find_spec
from multiprocessing import current_process

from reproduction.system.errors import UserError

HERE = "basic"  # Hydra's own: one point after the other, in this process
PARALLEL = ("parallel", "joblib")  # processes of this machine
SUBMITIT = ("slurm", "submitit_slurm", "submitit_local")  # jobs that may be started again
REQUIREMENTS = "requirements-cluster.txt"


def check_launcher(launcher: str, is_sweep: bool) -> None:
    """Raises UserError for a launcher that cannot start these points, naming what to install."""
    if not is_sweep:
        raise UserError(f"hydra/launcher={launcher}: starts the points of a sweep, add -m")
    if launcher == HERE:
        return
    known = dict.fromkeys(PARALLEL, "joblib") | dict.fromkeys(SUBMITIT, "submitit")
    if launcher not in known:
        raise UserError(
            f"hydra/launcher={launcher}: must be one of {', '.join((HERE, *PARALLEL, *SUBMITIT))}"
        )
    if not _has_plugin(f"hydra_{known[launcher]}_launcher"):
        raise UserError(
            f"hydra/launcher={launcher}: needs hydra-{known[launcher]}-launcher, "
            f"pip install -r {REQUIREMENTS}"
        )


def _has_plugin(name: str) -> bool:
    try:
        return find_spec(f"hydra_plugins.{name}") is not None
    except ModuleNotFoundError:  # of hydra_plugins: there is none at all
        return False


def check_resume(launcher: str, resume: str) -> None:
    """Raises UserError for runs that are started again but would not go on."""
    if launcher in SUBMITIT and resume != "auto":
        raise UserError(
            f"resume={resume}: must be auto for hydra/launcher={launcher}, which starts "
            "interrupted runs again"
        )


def own_gpus(gpus: list[str], devices: int) -> str:
    """CUDA_VISIBLE_DEVICES of this process: of a launcher's n-th the n-th share, for good."""
    number = re.search(r"\d+$", current_process().name)
    return gpu_share(gpus, int(number[0]) - 1 if number else 0, devices)


def gpu_share(gpus: list[str], number: int, devices: int) -> str:
    """CUDA_VISIBLE_DEVICES of the run with this number: its own `devices` of the GPUs, in turn."""
    first = number % max(1, len(gpus) // devices) * devices
    return ",".join(gpus[first : first + devices])
