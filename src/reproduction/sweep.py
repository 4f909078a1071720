"""A command of several runs as one object, from its words to its table.

A sweeper makes it. What it knows then, the points, the studies whose rows they are, and where it
writes, it has at the end; nothing is read a second time.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import env_override
from hydra.utils import get_class

from reproduction.compose import Point, expand, planned_point, shared_words, word_of
from reproduction.config import Config, Dataset, StudyWords, ViT, check_new
from reproduction.errors import (
    Interrupted,
    OneLineError,
    UserError,
    counts_text,
    program,
    say,
    warn,
)
from reproduction.folder import find
from reproduction.identity import files_of_code, row_hash
from reproduction.machine import is_first_rank
from reproduction.studies.study import Part, planned, swept_texts

if TYPE_CHECKING:  # imports pandas
    from reproduction.studies.runs import Run
    from reproduction.studies.table import Table

NOT_STARTED = "not started"
# tries every value and chooses none, as ours do, which are kinds of it
GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
CLASSES = 10  # of a model whose images are not here


@dataclass(frozen=True)
class Sweep:
    """Points in their order, and the studies that they are the runs of; none, of swept keys."""

    points: list[Point]
    parts: list[Part] = field(default_factory=list)
    is_whole: bool = True  # all points that the words name are here: there will be a table

    @classmethod
    def over_keys(cls, words: Sequence[str]) -> "Sweep":
        """Every value of these words by every other."""
        return cls([planned_point(each) for each in expand(words)])

    @classmethod
    def of_study(cls, asked: StudyWords, words: Sequence[str]) -> "Sweep":
        """The runs of a study, with `words` as overrides of all of them."""
        for word in map(word_of, words):
            if word.key == "seed":
                raise UserError(f"{word.text}: must be seeds=N, from the study's first_seed on")
            if word.key == "resume" and word.value != "auto":
                raise UserError(f"{word.text}: must be auto, with which a study is trained")
        return cls(*planned(asked.study, asked.seeds, asked.scale, words))

    def only(self, task: int | None) -> "Sweep":
        """The point of this number alone; all of them for None."""
        if task is None:
            return self
        if task >= len(self.points):
            raise UserError(f"task={task}: must be 0 to {len(self.points) - 1}")
        return replace(self, points=[self.points[task]], is_whole=False)

    def check(self, runs_here: bool = True) -> None:
        """Raises UserError for a point that cannot run, before the first one starts.

        What this machine lacks is only told if the points run on others.
        """
        for text in check_points(self.points, runs_here):
            warn(text)

    def wait(self, ends: Iterable[OneLineError | None]) -> list[OneLineError]:
        """Waits for the end of each point, and returns the errors."""
        errors = []
        try:
            for point, error in zip(self.points, ends, strict=True):
                if error is None:
                    continue
                # another process may have held the lock, and finished the run meanwhile
                is_mistake = error.status == UserError.status
                if not (is_mistake and point.folder.is_finished()):
                    errors.append(error)
        except KeyboardInterrupt as interrupt:
            errors.append(self.interrupted_by(interrupt))
        return errors

    def interrupted_by(self, interrupt: KeyboardInterrupt) -> Interrupted:
        """Returns the error of a sweep that a signal has ended."""
        line = f"interrupted; {self.points[0].config.how_to_continue}"
        return Interrupted(str(interrupt) or line)

    def conclude(self, errors: Sequence[OneLineError]) -> None:
        """Tells errors, writes the tables, and ends the program unless all runs are finished."""
        for error in errors:
            warn(f"{program()}: {error}")
        runs = self.write_tables()
        if errors or any(run.status != "finished" for run in runs):
            # a signal counts more than a mistake, and that more than what a machine could not do
            sys.exit(max((error.status for error in errors), default=1))

    def write_tables(self) -> list["Run"]:
        """Prints and writes the tables, and says what has become of the runs, which it returns.

        Their folders tell it. Where only one of the points is trained there is no table.
        """
        runs = [run_of(point) for point in self.points]
        if not self.is_whole:
            return runs
        from reproduction.studies.page import write_page  # imports matplotlib

        outputs = Path(self.points[0].config.output_root)
        written = []
        for table in self._tables([x for x in runs if x.status != NOT_STARTED], outputs):
            say(f"\n# {table.title}\n\n{table.markdown(is_short=True)}")
            written.append(write_page(table, outputs))
        if written:
            say(f"\nwritten to {', '.join(map(str, written))}; .csv has the numbers")
        counts = Counter(run.status for run in runs)
        finished = counts.pop("finished", 0)
        parts = [f"{finished} of {len(runs)} runs are finished", counts_text(counts)]
        say(", ".join(filter(None, parts)))
        return runs

    def _tables(self, begun: Sequence["Run"], outputs: Path) -> Iterator["Table"]:
        """Yields the table of each study of which there is something, or that of swept keys."""
        from reproduction.studies.rows import study_table, sweep_table

        for part in self.parts:
            table = study_table(part, begun, outputs)
            if table.counted.runs or table.extras:
                yield table
        if not self.parts and any(run.status != "unusable" for run in begun):
            yield sweep_table(self.points, begun)

    def listing(self) -> str:
        """Returns a line for each run, how many have which status, and their folders.

        What it lists starts: all points are checked, and what only this machine lacks is told.
        UserError for what cannot run.
        """
        import pandas as pd

        from reproduction.studies.runs import ON_TEST
        from reproduction.studies.table import as_markdown, formatted

        shared = shared_words(self.points)
        rows, folders = [], []
        counts = Counter[str]()
        for task, point in enumerate(self.points):
            run = run_of(point)
            differing = [x for x in point.words if x not in shared and word_of(x).key != "seed"]
            row = {
                "task": str(task),
                "row": point.label or ",".join(swept_texts(differing)),
                "seed": str(point.config.seed),
                "status": run.status_text,
                "top-1 [%]": formatted(run.outcomes.get(ON_TEST), ".2f"),
            }
            rows.append(row)
            folders.append(f"{task}: {run.path}")
            counts[run.status] += 1
        lacks = check_points(self.points, runs_here=False)
        total = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
        each = counts_text(dict(counts.most_common()))
        table = as_markdown(pd.DataFrame(rows))
        return "\n".join([table, "", *folders, "", *lacks, f"{total}: {each}"])


def run_of(point: Point) -> "Run":
    """Returns what has become of a point; its folder may also hold another run."""
    from reproduction.studies.runs import Run, read_run

    folder = point.folder
    if folder.is_run():
        run = read_run(folder)
        is_ours = (run.row_hash, run.seed) == (row_hash(point.config), point.config.seed)
        if is_ours or run.status == "unusable":
            return run
    return Run(path=folder.path, status=NOT_STARTED, status_text=NOT_STARTED)


def check_choice(points: Sequence[Point], sweeper: str) -> None:
    """Raises UserError if a sweeper that chooses settings would choose them on the test set."""
    from reproduction.data.sources import opened  # imports torch

    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in get_class(sweeper).mro()]
    if GRID in kinds:  # not by the class itself, which Hydra's search for plugins makes anew
        return
    for point in points:
        if opened(point.config.dataset).validation is None:
            reason = "chooses settings, and so needs a validation split: dataset.validation=0.1"
            raise UserError(f"hydra.sweeper={sweeper}: {reason}")


# --- the check of points ------------------------------------------------------------------------


def check_points(points: Sequence[Point], runs_here: bool) -> list[str]:
    """Checks all that runs do before their first step; UserError for what cannot run.

    Returns what this machine lacks, unless they run here.
    """
    checks = Checks(runs_here)
    names = Counter(str(point.folder.path) for point in points)
    path, number = names.most_common(1)[0]
    if number > 1:
        raise UserError(f"name={path}: {number} points share it; name='x-${{KEY}}' names each")
    for point in points:
        with env_override({**point.environment}):  # which the code that opens data may read
            checks.check_folder(point)
            if not point.folder.is_finished():
                checks.check_run(point.config)
    return [f"not here: {text}" for text in checks.lacks]


@dataclass
class Checks:
    """Checks run after run; those that differ in their seed alone are checked once."""

    runs_here: bool
    lacks: dict[str, None] = field(default_factory=dict)  # in their order, each once
    checked: set[tuple[str, ...]] = field(default_factory=set)

    def check_folder(self, point: Point) -> None:
        """Checks that the folder can be used, and that its run is of the same data."""
        from reproduction.data.sources import opened, record  # imports torch

        config, folder = point.config, point.folder
        folder.check(config)
        if not folder.is_taken():  # what has begun may go on
            check_new(config)
        if config.resume == "auto":
            for other in find(config):
                if other.path != folder.path:
                    warn(f"{folder.path}: {other.path} holds the same run, and is left as it is")
        summary = folder.read_summary()
        if summary.get("data") and self.has_images(config.dataset):
            folder.check_same("data", record(opened(config.dataset), config.model.weights))
        if summary.get("code"):
            with self.noting_modules():
                folder.check_same("code", files_of_code(config))

    def check_run(self, config: Config) -> None:
        """Checks the device, the images, the model and code of one's own."""
        from reproduction.models.build import try_pass, without_weights  # imports torch
        from reproduction.training.trial import check_start

        recipe = config.recipe
        metrics = str(recipe.metrics), str(recipe.metrics_options)  # which are in no hash
        setting = row_hash(config), config.device, str(config.compile), *metrics
        if setting in self.checked or not is_first_rank():
            return
        self.checked.add(setting)
        self.check_device(config)
        if not self.runs_here and isinstance(config.model, ViT):  # its first weights are a download
            config = replace(config, model=replace(config.model, pretrained=None))
        with self.noting_modules():
            if self.has_images(config.dataset):
                check_start(config)
            else:
                model = without_weights(config.model)
                try_pass(replace(config, model=model), CLASSES)

    @contextmanager
    def noting_modules(self) -> Iterator[None]:
        """Notes a module that this machine lacks; it is an error if the run is here."""
        try:
            yield
        except UserError as error:
            if self.runs_here or not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            self.lacks[str(error)] = None

    def check_device(self, config: Config) -> None:
        from reproduction.training.ranks import resolve_device  # imports torch

        try:
            resolve_device(config.device, config.devices, config.recipe.precision, config.compile)
        except UserError as error:
            if self.runs_here or config.device == "cpu":
                raise
            self.lacks[str(error)] = None

    def has_images(self, dataset: Dataset) -> bool:
        """Whether images can be opened; training fails for their lack, or downloads them."""
        from reproduction.data.sources import check_source, opened  # imports torch

        if self.runs_here:
            return True
        with self.noting_modules():
            check_source(dataset)
            place = dataset.fixed.place if dataset.fixed is not None else ""
            if dataset.root is None or Path(dataset.root, place).exists():
                opened(dataset)
                return True
            self.lacks[f"dataset.root={dataset.root}: {dataset.name} is not here"] = None
        return False
