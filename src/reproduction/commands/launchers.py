"""Support for Hydra's launchers: plugin checks, the resume check and GPU assignment."""

import re
from importlib.util import find_spec
from multiprocessing import current_process

from reproduction.system.errors import UserError

HERE = "basic"  # Hydra's default: one point after the other, in this process
PARALLEL = ("parallel", "joblib")  # processes on this machine
SUBMITIT = ("slurm", "submitit_slurm", "submitit_local")  # jobs that may be restarted
REQUIREMENTS = "requirements-cluster.txt"


def check_launcher(launcher: str, is_sweep: bool) -> None:
    """Raises UserError if the launcher is unknown, not installed or used without a sweep."""
    if not is_sweep:
        raise UserError(f"hydra/launcher={launcher}: needs a sweep, add -m")
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
    except ModuleNotFoundError:  # hydra_plugins itself is missing
        return False


def check_resume(launcher: str, resume: str) -> None:
    """Raises UserError if the launcher restarts runs but `resume` does not let them resume."""
    if launcher in SUBMITIT and resume != "auto":
        raise UserError(
            f"resume={resume}: must be auto for hydra/launcher={launcher}, which restarts "
            "interrupted runs"
        )


def own_gpus(gpus: list[str], devices: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES for this process: the n-th worker gets the n-th share."""
    number = re.search(r"\d+$", current_process().name)
    return gpu_share(gpus, int(number[0]) - 1 if number else 0, devices)


def gpu_share(gpus: list[str], number: int, devices: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES for run `number`: `devices` GPUs, assigned round-robin."""
    first = number % max(1, len(gpus) // devices) * devices
    return ",".join(gpus[first : first + devices])
