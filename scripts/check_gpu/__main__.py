"""Checks the results of a GPU, then measures it: two stages, each within 9 minutes.

Every part is a process with its own time limit, so that one that hangs does not affect the others.
check.json and check.md always hold the results so far. Exits with status 1 if a check fails.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from reproduction.config import ROOT
from reproduction.runs.folder import check_writable
from reproduction.system.hardware import hardware_name, keep_freed_memory
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors
from reproduction.training.distributed import resolve_device
from reproduction.training.train import git_revision
from scripts.benchmark.report import check_page, put_on_page
from scripts.check_gpu import correctness, figures
from scripts.check_gpu.parts import Finding, Part, Scope, losses

FILE, MARKDOWN, MARK = "check.json", "check.md", "check-gpu"
WORDS = {True: "ok", False: "WRONG", None: ""}
STDERR_CHARACTERS = 300  # shown of a part that fails


class Limited(NamedTuple):
    """A part and its time limit in seconds."""

    part: Part
    limit: int


STAGES: Mapping[str, Mapping[str, Limited]] = {
    "correctness": {
        "losses": Limited(losses, 150),
        "waits": Limited(correctness.waits, 45),
        "quickstart": Limited(correctness.quickstart, 120),
        "memory": Limited(correctness.memory, 30),
        "skipping": Limited(correctness.skipping, 30),
        "one_rank": Limited(correctness.one_rank, 30),
        "compiling": Limited(correctness.compiling, 100),
        "same_seed": Limited(correctness.same_seed, 30),
    },
    "figures": {
        "steps": Limited(figures.steps, 100),
        "detectors": Limited(figures.detectors, 40),
        "oracle": Limited(figures.oracle, 80),
        "busy": Limited(figures.busy, 60),
        "batches": Limited(figures.batches, 120),
        "loader": Limited(figures.loader, 90),
        "backends": Limited(figures.backends, 30),
    },
}
PARTS = {name: limited for parts in STAGES.values() for name, limited in parts.items()}


def parser() -> Parser:
    options = Parser(prog="check_gpu", description=__doc__, usage=argparse.SUPPRESS)
    options.add_argument("--stage", choices=STAGES, help="default: both")
    options.add_argument("--parts", nargs="+", choices=PARTS, help="default: all of the stage")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="smallest sizes, for a test")
    options.add_argument("--page", metavar="FILE.md", help="put the table on this page as well")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")
    options.add_argument("--here", metavar="FILE.json", help=argparse.SUPPRESS)  # internal
    return options


@one_line_errors("check_gpu")
def main() -> None:
    args = parser().parse_args()
    device = resolve_device(args.device, 1)
    scope = Scope(torch.device(device), args.tiny)
    if args.here is not None:
        write_findings(args.parts[0], scope, Path(args.here))
        return
    path = Path(args.outputs, "check-gpu", FILE).absolute()
    check_writable(path, f"outputs={args.outputs}")
    if args.page is not None:
        check_page(Path(args.page), MARK)
    chosen = args.parts or (STAGES[args.stage] if args.stage else PARTS)
    report = read(path, _machine(device, args.tiny))
    for name in chosen:
        result = report["parts"][name] = run_part(name, scope)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report, indent=1) + "\n")
        write_text(path.with_name(MARKDOWN), markdown(report))
        print(f"{name}: {len(result['findings'])} findings in {result['seconds']} s", flush=True)
    print(markdown(report) + f"\nwritten to {path.parent}")
    if args.page is not None:
        put_on_page(Path(args.page), markdown(report), MARK)
    findings = [finding for name in chosen for finding in report["parts"][name]["findings"]]
    sys.exit(int(any(is_right is False for _, _, is_right in findings)))


def _machine(device: str, tiny: bool) -> dict[str, Any]:
    code = hashlib.sha256()
    for path in sorted([*ROOT.glob("s*/**/*.py"), *ROOT.glob("conf/**/*.yaml")]):
        code.update(path.read_bytes())
    return {
        "hardware": hardware_name(device),
        "device": device,
        "torch": torch.__version__,
        "git_revision": git_revision(),
        "code": code.hexdigest(),  # a copy may lack a revision or differ from it
        "tiny": tiny,
    }


def read(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """The report of earlier parts, if on this machine and with this code; else an empty one."""
    if path.exists() and (report := json.loads(path.read_text()))["machine"] == machine:
        return report
    return {"machine": machine, "parts": {}}


def write_findings(name: str, scope: Scope, path: Path) -> None:
    """Writes a part's findings, all of them after each, so that a timeout loses none."""
    if scope.device.type == "cpu":
        keep_freed_memory()
    findings: list[Finding] = []
    for finding in PARTS[name].part(scope):
        findings.append(finding)
        write_text(path, json.dumps(findings))


def run_part(name: str, scope: Scope) -> dict[str, Any]:
    """Runs a part in a new process and an empty folder; returns its findings and seconds."""
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        path = Path(folder, FILE)
        command = [sys.executable, "-m", "scripts.check_gpu", "--parts", name]
        command += ["--device", scope.device.type, "--here", str(path)]
        command += ["--tiny"] if scope.tiny else []
        inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        paths = [str(ROOT), str(ROOT / "src"), *map(os.path.abspath, inherited)]
        with subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                _, stderr = process.communicate(timeout=PARTS[name].limit)
                end = f"status {process.returncode}: {stderr.strip()[-STDERR_CHARACTERS:]}"
            except BaseException as error:  # also Ctrl-C, which does not reach the part's session
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                end = f"stopped at its limit of {PARTS[name].limit} s"
        findings = json.loads(path.read_text()) if path.exists() else []
    if process.returncode != 0:
        findings.append(Finding("the process", end, False))
    return {"findings": findings, "seconds": round(time.monotonic() - start, 1)}


def markdown(report: Mapping[str, Any]) -> str:
    """The machine, then a table of all findings."""
    machine = report["machine"]
    lines = [
        f"{machine['hardware']}, {machine['device']}, torch {machine['torch']}, revision "
        f"{machine['git_revision']}."
        + (" A test with tiny sizes, not a measurement." if machine["tiny"] else ""),
        "",
        "| part | what | found | |",
        "|---|---|---|---|",
    ]
    for name, part in report["parts"].items():
        for what, figure, is_right in part["findings"]:
            cell = " ".join(figure.split()).replace("|", "\\|")
            lines.append(f"| {name} | {what} | {cell} | {WORDS[is_right]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
