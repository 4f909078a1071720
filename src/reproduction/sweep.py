"""A command of several runs as one object, from its overrides to its table.

A sweeper makes it. What it knows then, the plans, the studies whose rows they are, and where it
writes, it has at the end; nothing is read a second time.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reproduction.compose import RunPlan, key_of
from reproduction.config import StudyOptions
from reproduction.errors import (
    OneLineError,
    UserError,
    counts_text,
    program,
    say,
    warn,
)
from reproduction.identity import files_of_code, row_hash
from reproduction.machine import is_first_rank
from reproduction.studies.study import Part, planned

if TYPE_CHECKING:  # imports pandas
    from reproduction.studies.runs import Run

NOT_STARTED = "not started"


@dataclass(frozen=True)
class Sweep:
    """Runs in their order, and the studies that they are the runs of; none, of swept keys."""

    plans: list[RunPlan]
    parts: list[Part] = field(default_factory=list)
    is_whole: bool = True  # all runs that the overrides name are here: there will be a table

    @classmethod
    def of_study(cls, asked: StudyOptions, overrides: Sequence[str]) -> "Sweep":
        """The runs of a study, with `overrides` as overrides of all of them."""
        for override in overrides:
            if key_of(override) == "seed":
                raise UserError(f"{override}: must be seeds=N, from the study's first_seed on")
        return cls(*planned(asked.study, asked.seeds, asked.scale, overrides))

    def only(self, task: int | None) -> "Sweep":
        """The run of this number alone; all of them for None."""
        if task is None:
            return self
        if task >= len(self.plans):
            raise UserError(f"task={task}: must be 0 to {len(self.plans) - 1}")
        return replace(self, plans=[self.plans[task]], is_whole=False)

    def check_folders(self) -> None:
        """Raises UserError if two runs share a folder, or one cannot be used for its run."""
        path, number = Counter(str(plan.folder.path) for plan in self.plans).most_common(1)[0]
        if number > 1:
            raise UserError(f"name={path}: {number} runs share it; name='x-${{KEY}}' names each")
        for plan in self.plans:
            plan.folder.check(plan.config)

    def conclude(self, errors: Sequence[OneLineError]) -> None:
        """Prints errors, writes the tables, and ends the program unless all runs are finished."""
        for error in errors:
            warn(f"{program()}: {error}")
        runs = self.write_tables()
        if errors or any(run.status != "finished" for run in runs):
            # a signal counts more than a mistake, and that more than what a machine could not do
            sys.exit(max((error.status for error in errors), default=1))

    def write_tables(self) -> list["Run"]:
        """Prints and writes the tables, and says what has become of the runs, which it returns.

        Their folders tell it. Where only one of the plans is trained there is no table.
        """
        runs = [run_of(plan) for plan in self.plans]
        if not self.is_whole:
            return runs
        from reproduction.studies.tables import study_table, sweep_table  # imports matplotlib

        outputs = self.plans[0].path.parent
        written = []
        begun = [run for run in runs if run.status != NOT_STARTED]
        tables = [study_table(part, begun) for part in self.parts]
        tables = [table for table in tables if table.counted.runs]
        if not self.parts and any(run.status != "unusable" for run in begun):
            tables = [sweep_table(self.plans, begun)]
        for table in tables:
            say(f"\n# {table.title}\n\n{table.markdown()}")
            written.append(table.write_page(outputs))
        if written:
            say(f"\nwritten to {', '.join(map(str, written))}; .csv has the numbers")
        counts = Counter(run.status for run in runs)
        finished = counts.pop("finished", 0)
        parts = [f"{finished} of {len(runs)} runs are finished", counts_text(counts)]
        say(", ".join(filter(None, parts)))
        return runs

    def listing(self) -> str:
        """Returns a line for each run, what has become of it and its folder, and their number.

        It is no check of this machine: what is listed may lack a GPU or its images here.
        """
        self.check_folders()
        lines = []
        counts = Counter[str]()
        for task, plan in enumerate(self.plans):
            run = run_of(plan)
            lines.append(f"{task}: {plan.label} {run.status_text}: {run.path}")
            counts[run.status] += 1
        total = "1 run" if len(lines) == 1 else f"{len(lines)} runs"
        return "\n".join([*lines, f"{total}: {counts_text(dict(counts.most_common()))}"])


def run_of(plan: RunPlan) -> "Run":
    """Returns what has become of a planned run."""
    from reproduction.studies.runs import Run, read_run

    folder = plan.folder
    if folder.is_run():
        return read_run(folder)
    return Run(path=folder.path, status=NOT_STARTED, status_text=NOT_STARTED)


# --- checks -------------------------------------------------------------------------------------


def check_here(plans: Sequence[RunPlan]) -> None:
    """Raises UserError if this machine cannot train one of these runs, before the first begins."""
    if not is_first_rank():
        return
    from reproduction.training.trial import check_start  # imports torch

    checked = set()
    for plan in plans:
        check_same(plan)
        metrics = str(plan.config.recipe.metrics), str(plan.config.recipe.metrics_options)
        setting = row_hash(plan.config), *metrics  # those that differ in the seed: once
        if setting not in checked and not plan.folder.is_finished():
            check_start(plan.config)
        checked.add(setting)


def check_same(plan: RunPlan) -> None:
    """Raises UserError for a run that has learnt from other data, or by other code, than now."""
    from reproduction.data.sources import opened, record  # imports torch

    config, folder = plan.config, plan.folder
    if not (folder.is_finished() or folder.checkpoints()):
        return
    summary = folder.read_summary()
    then = summary.get("data", {}) | summary.get("code", {})
    now = record(opened(config.dataset), config.model.weights) | files_of_code(config)
    others = [f"{x} then, {now[key]} now" for key, x in then.items() if now.get(key, x) != x]
    if others:
        reason = f"{folder.path} was trained with other data or other code: {', '.join(others)}"
        advice = "choose another output_root, or move that folder away"
        raise UserError(f"name={folder.path.name}: {reason}; {advice}")
