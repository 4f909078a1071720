"""Measures what docs/performance.md says of a GPU, part by part, within some minutes.

Parts: a, the assignment's kernel against scipy; b, losses of compiled steps and graphs beside eager
ones; c, times of steps; d, the largest kernels; e, unfinished seeds of studies that name a GPU.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from reproduction.system.errors import UserError
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors, positive, say
from scripts.on_gpu.sheet import sheet_as_markdown

# letter -> name, module and function, share of the time; what a part leaves goes to the later ones
PARTS = {
    "a": ("assignment", "assignment.measure_assignment", 1),
    "b": ("values", "steps.compare_values", 2),
    "c": ("times", "steps.measure_times", 3),
    "d": ("kernels", "steps.measure_kernels", 1),
    "e": ("seeds", "seeds.train_seeds", 1),
}
ROWS, CHARACTERS = 16, 2800  # of a table, of a part, on the terminal
GRACE = 5.0  # seconds between asking a process to end and ending it


@one_line_errors("on-gpu")
def main() -> None:
    parser = Parser(prog="on-gpu", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=8, help="time of all parts together")
    parser.add_argument("--parts", default=",".join(PARTS), help="such as a,c (default: all)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, for a test"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="runs of part e at a time")
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    args = parser.parse_args()
    letters = args.parts.split(",")
    if unknown := [letter for letter in letters if letter not in PARTS]:
        raise UserError(f"parts={args.parts}: {unknown[0]!r} must be one of {', '.join(PARTS)}")
    folder = Path(args.outputs, "on-gpu")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"outputs={args.outputs}: {error.strerror}") from error
    if args.device == "cuda":
        check_gpu()
    over, failed = time.time() + 60 * args.minutes, False
    for place, letter in enumerate(letters):
        name, function, share = PARTS[letter]
        left = over - time.time() - GRACE
        limit = left * share / sum(PARTS[each][2] for each in letters[place:])
        say(f"{letter}: {name}, at most {max(limit, 0):.0f} s")
        words = [str(args.jobs)] if name == "seeds" else []
        why = run_part(function, args.device, folder / f"{name}.json", limit, *words)
        failed = failed or why is not None
        say(report(folder / f"{name}.json", why))
    say(f"written to {folder}")
    sys.exit(failed)


def check_gpu() -> None:
    """UserError without a GPU, asked for in a process of its own, so that this one holds none."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        raise UserError(
            "device=cuda: this machine has no CUDA GPU, allowed is cpu, with tiny sizes"
        )


def run_part(function: str, device: str, path: Path, limit: float, *more: str) -> str | None:
    """Runs the function of a part in a process of its own, and ends it at its limit in seconds.

    A kernel that hangs can be left only by the end of its process. Returns the last line of an
    error, if the part ended with one.
    """
    words = [function, device, str(path), str(time.time() + limit), *more]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.on_gpu.part", *words],
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that a compiler's workers end with it
        )
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part as well
        try:
            status = process.wait(max(limit, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)
            signal.signal(signal.SIGTERM, before)
        return None if status == 0 else f"status {status}: {last_line(log)}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = log.read().strip().splitlines() or ["no output"]
    return lines[-1][:300]


def report(path: Path, error: str | None) -> str:
    """Writes the tables of a part beside its file, and returns their beginnings."""
    lines = [] if error is None else [f"the part ended with {error}"]
    if path.exists():
        write_text(path.with_suffix(".md"), sheet_as_markdown(path))
        text = sheet_as_markdown(path, ROWS)
        is_long = len(text) > CHARACTERS
        lines.append(
            f"{text[:CHARACTERS]}\n... more in {path.with_suffix('.md')}" if is_long else text
        )
    return "\n".join(lines) or "nothing was measured"


if __name__ == "__main__":
    main()
