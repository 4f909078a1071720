"""Runs as a table: read from folders, grouped over seeds, with what differs; a sweep's end."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import ttest_rel

from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.start.resolve import resolve
from reproduction.studies.columns import value_text
from reproduction.studies.pictures import draw_runs
from reproduction.studies.publish import publish
from reproduction.studies.runs import left, newest, read_runs, read_store, state_text
from reproduction.studies.sweeps import runs_table
from reproduction.studies.table import Table
from reproduction.system.errors import UserError
from scripts import runs as script
from tests.reproduction.conftest import SMALL, Command, config_of
from tests.reproduction.tables import set_time, write_run

PLAIN = ["augmentation=[]"]


def text(table: Table) -> str:
    return "\n".join(table.lines())


def runs_of(outputs: Path, *variants: list[str], seeds: int = 2) -> None:
    """Writes finished runs of each variant; accuracies rise with the variant and the seed."""
    for number, overrides in enumerate(variants):
        for seed in range(seeds):
            write_run(outputs, config_of(*overrides), seed, top1=60.0 + 3 * number + seed**2)


def test_read_runs_gives_a_row_for_each_folder(tmp_path: Path):
    run = write_run(tmp_path, config_of(), 1, "mine", error=None, hardware="A GPU")
    (tmp_path / "report").mkdir()
    (tmp_path / "smoke").mkdir()
    (tmp_path / ".logs").mkdir()
    (tmp_path / "notes").mkdir()
    runs = read_runs(tmp_path).set_index("folder")
    assert list(runs.index) == ["mine", "notes"]
    mine = runs.loc["mine"]
    assert (mine.status, mine.seed, mine.top1_last, mine.hardware) == ("finished", 1, 81, "A GPU")
    assert mine.settings["augmentation.htm.tau"] == "auto" and "seed" not in mine.settings
    assert (mine.mixed_share, mine.top1_best10, mine.planned) == (0.25, 81, mine.epochs)
    notes = runs.loc["notes"]
    assert (notes.status, notes.error) == (
        "unusable",
        "is not a run folder: it has no config.yaml",
    )
    assert read_runs(run).folder.tolist() == ["mine"]
    with pytest.raises(UserError, match="there is no such folder of runs"):
        read_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("value", ["high", None, True])
def test_a_finished_run_without_an_accuracy_is_unusable(tmp_path: Path, value: object):
    write_run(tmp_path, config_of(), top5_last=value)
    (run,) = read_runs(tmp_path).itertuples()
    assert run.status == "unusable" and f"top5_last is {value}, no number" in run.error


def test_newest_finished_run_of_a_seed_counts(tmp_path: Path):
    set_time(write_run(tmp_path, config_of(), 0, "old", top1=50.0), 1)
    set_time(write_run(tmp_path, config_of(), 0, "new", top1=60.0), 2)
    set_time(write_run(tmp_path, config_of(), 0, "broken", top1=60.0, status="failed"), 3)
    set_time(write_run(tmp_path, config_of(), 1, "other", status="failed", error="a\nb"), 3)
    runs = read_runs(tmp_path)
    assert newest(runs).folder.tolist() == ["new"]
    (open_run,) = left(runs).itertuples()  # another run of seed 0 is finished
    assert (open_run.folder, open_run.error) == ("other", "a b")
    assert state_text(open_run) == "failed after epoch 28 of 28"


def test_training_writes_what_it_mixed_and_its_evaluated_epochs(command: Command, tmp_path: Path):
    """And the same after an interruption: see test_checkpoints.py for exact resuming."""
    args = [*SMALL, "augmentation.htm.tau=inf", "recipe.epochs=3", "recipe.evaluate_every=2"]
    assert command("train", "name=mine", *args).status == 0
    run = RunFolder(tmp_path / "outputs/mine")
    written = run.read_summary()
    assert written["mixed_share"] == 1 and written["mixed_samples"] == 20
    assert [line["epoch"] for line in written["log"]] == [2, 3]
    steps, _ = run.read_metrics()
    last = [line for line in steps if line["epoch"] == 3]
    tokens = sum(line["mixed_tokens"] * line["mixed_samples"] for line in last)
    mixed = sum(line["mixed_samples"] for line in last)
    assert written["mixed_tokens"] == pytest.approx(tokens / mixed)


@pytest.mark.usefixtures("unevaluated")
def test_publish_refuses_runs_whose_line_could_not_be_checked(command: Command, tmp_path: Path):
    args = ["name=mine", "augmentation=[htm]", "augmentation.htm.tau=inf", "recipe.max_steps=2"]
    assert command("train", *args, *SMALL).status == 0
    run, results = RunFolder(tmp_path / "outputs/mine"), tmp_path / "results"
    summary = run.read_summary()
    for changes, reason in (
        ({"status": "interrupted"}, "run=mine: is not finished"),
        ({"steps": 9}, r"last\.pt: is not from the last step of the run"),
        ({"mixed_share": ...}, "lacks .*mixed_share"),
    ):
        changed = {key: x for key, x in {**summary, **changes}.items() if x is not ...}
        run.summary_path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=reason):
            publish(run.path, results)
        assert not results.exists()
    run.summary_path.write_text(json.dumps(summary))
    weights = run.config_path.read_text().replace("weights: null", f"weights: {tmp_path}/x.pt")
    run.config_path.write_text(weights)
    for _ in range(2):  # the line of the same run is replaced
        path = publish(run.path, results)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["name"] == "mine" and path.name == "others.jsonl"
    (trained,), (published,) = (x.itertuples() for x in (read_runs(run.path), read_store(results)))
    assert published.key == trained.key and published.settings["model.weights"] == "x.pt"
    assert published.settings["augmentation.htm.tau"] == trained.settings["augmentation.htm.tau"]


def test_runs_table_shows_what_differs_grouped_over_seeds(tmp_path: Path):
    taus = [[f"augmentation.htm.tau={tau}"] for tau in (2.5, 0.5, "inf")]
    runs_of(tmp_path, *taus)
    table = runs_table(read_runs(tmp_path))
    shown = table.shown()
    assert shown.columns.tolist() == ["tau", "n", "last", "best", "mixed", "status"]
    assert shown.tau.tolist() == ["0.5", "2.5", "inf"]
    assert shown["last"].tolist() == [
        "63.50 +/- 0.71",
        "60.50 +/- 0.71",
        "66.50 +/- 0.71",
    ]
    assert set(shown.n) == {"2"} and set(shown.status) == {"finished"}
    assert shown["mixed"][0] == "25.0" and "differs as well" not in text(table)
    assert "cct_2_3x2, digits, htm+vtm: 6 runs, 6 finished; " in text(table)


def test_runs_table_names_models_and_stacks_instead_of_all_their_keys(tmp_path: Path):
    runs_of(tmp_path, ["augmentation=[htm]"], PLAIN, [*PLAIN, "model=vit_lite_6_4"], seeds=1)
    table = runs_table(read_runs(tmp_path))
    assert [*table.heads] == ["mixing", "model.name"] and "differs as well" not in text(table)
    assert table.shown()["mixing"].tolist() == ["htm", "none", "none"]
    assert table.shown().status.tolist() == ["finished"] * 3


def test_runs_table_lists_keys_that_follow_from_its_columns(tmp_path: Path):
    runs_of(tmp_path, [*PLAIN, "recipe.lr=0.1"], [*PLAIN, "recipe.lr=0.2", "recipe.epochs=3"])
    table = runs_table(read_runs(tmp_path))
    assert [*table.heads] == ["epochs"] and "differs as well: recipe.lr" in text(table)


def test_settings_that_change_the_training_are_columns(tmp_path: Path):
    cifar = ["dataset=cifar10", "dataset.validation=0.1", "model.depth=3"]
    runs_of(tmp_path, [*PLAIN, "dataset.limit=60"], [*PLAIN, *cifar], seeds=1)
    table = runs_table(read_runs(tmp_path))
    assert [*table.heads] == ["dataset.name", "limit", "dataset.validation", "depth"]
    assert "differs as well" not in text(table)


def test_runs_of_two_and_of_28_epochs_are_told_apart_by_more_than_tau(tmp_path: Path):
    tau = "augmentation.htm.tau"
    runs_of(tmp_path, [f"{tau}=1", "recipe.epochs=2"], [f"{tau}=2", "recipe.epochs=28"], seeds=1)
    shown = runs_table(read_runs(tmp_path)).shown()
    assert shown.tau.tolist() == ["1", "2"] and shown.epochs.tolist() == ["2", "28"]


def test_auto_stands_with_its_number(tmp_path: Path):
    for seed in range(3):
        htm = {"tau": [1.0], "rho": [0.02]}
        write_run(tmp_path, config_of(), seed, htm=htm)
        other = config_of("augmentation.htm.tau=2")
        write_run(tmp_path, other, seed, htm=htm | {"tau": [2.0]}, top1=85.0 + seed**2)
    table = runs_table(read_runs(tmp_path), "tau=auto")
    assert table.shown().tau.tolist() == ["2", "auto (1)"]
    assert table.numbers.test_p.notna().tolist() == [True, False]


def test_a_row_that_mixed_nothing_says_so(tmp_path: Path):
    for seed in range(3):
        write_run(tmp_path, config_of(), seed, mixed_tokens=9.0)
        idle = {"mixed_share": 1.0, "mixed_tokens": 0.0}
        write_run(tmp_path, config_of("augmentation.htm.rho=1"), seed, top1=80 + seed**2, **idle)
    shown = runs_table(read_runs(tmp_path), "rho=auto").shown().set_index("rho")
    assert shown.loc["1", "difference"] == "+0.67 (mixed nothing)"
    assert (shown.loc["1", "mixed"], shown.loc["1", "tokens"]) == ("100.0", "0.0")


def test_runs_may_differ_in_what_is_also_measured(tmp_path: Path):
    runs_of(tmp_path, [*PLAIN, "devices=1"], [*PLAIN, "devices=2"])
    assert runs_table(read_runs(tmp_path)).shown().devices.tolist() == ["1", "2"]


@pytest.mark.parametrize(
    ("key", "title"),
    [("dataset.validation", "dataset.validation"), ("+dataset.options.n", "options.n")],
)
def test_a_setting_never_takes_the_place_of_a_result(tmp_path: Path, key: str, title: str):
    own = ["dataset=custom", "dataset.source=own:load"] if "options" in key else []
    runs_of(tmp_path, *([*PLAIN, *own, f"{key}={value}"] for value in (0.1, 0.2)))
    shown = runs_table(read_runs(tmp_path)).shown()
    assert shown[title].tolist() == ["0.1", "0.2"] and shown.n.tolist() == ["2", "2"]


def test_runs_table_shows_unfinished_and_unusable_runs(tmp_path: Path):
    write_run(tmp_path, config_of(), 0)
    write_run(tmp_path, config_of(), 1, status="failed", error="CUDA | out\nof memory", epochs=3)
    (tmp_path / "foreign").mkdir()
    page = text(runs_table(read_runs(tmp_path)))
    assert "1 finished; seed 1 failed after epoch 3 of 28" in page
    assert "run1: CUDA | out of memory" in page and "no runs: 1 folders (foreign)" in page


def test_against_tests_rows_that_differ_in_one_setting(tmp_path: Path):
    points = [
        [f"augmentation.htm.tau={t}", f"augmentation.htm.rho={r}"] for t in (1, 2) for r in (0, 1)
    ]
    for number, overrides in enumerate(points):
        for seed, top1 in enumerate([50.0, 52.0, 55.0]):
            write_run(tmp_path, config_of(*overrides), seed, top1=top1 + number * (seed + 1))
    runs = read_runs(tmp_path)
    table = runs_table(runs, "tau=1")
    assert runs_table(runs, "augmentation.htm.tau=1").numbers.equals(table.numbers)
    by_values = table.numbers.set_index(["tau", "rho"])
    row, base = by_values.loc[(2.0, 1.0)], by_values.loc[(1.0, 1.0)]
    test = ttest_rel([53, 58, 64], [51, 54, 58])
    assert row.difference == pytest.approx(4) and row.test_p == pytest.approx(test.pvalue)
    assert pd.isna(base.difference) and row.test_p_holm >= row.test_p
    with pytest.raises(UserError, match="against=lr=1: must be one of tau="):
        runs_table(runs, "lr=1")
    with pytest.raises(UserError, match="against=tau=7: tau must be one of 1, 2"):
        runs_table(runs, "tau=7")


@pytest.mark.parametrize(
    ("variants", "is_drawn"),
    [
        ([["recipe.lr=0.1"], ["recipe.lr=0.2"]], True),
        (
            [[f"recipe.lr={x}", f"seed={0}", f"recipe.epochs={y}"] for x in (1, 2) for y in (1, 2)],
            True,
        ),
        ([["recipe.lr=0.1"]], False),  # nothing differs
    ],
)
def test_plot_shows_one_or_two_settings(tmp_path: Path, variants: list[list[str]], is_drawn: bool):
    runs_of(tmp_path / "outputs", *([*PLAIN, *variant] for variant in variants))
    path = tmp_path / "plot.png"
    runs = read_runs(tmp_path / "outputs")
    assert draw_runs(runs_table(runs), runs, path) == is_drawn == path.exists()


def test_values_are_shown_as_on_the_command_line():
    values = [True, [0, 0.5], None, float("inf"), 1e-5, "x" * 90]
    texts = ["true", "[0,0.5]", "-", "inf", "1e-05", "x" * 77 + "..."]
    assert [value_text(value) for value in values] == texts


def test_plot_shows_the_validation_split(tmp_path: Path, drawn_texts: dict[str, list[str]]):
    split = {"selected_epoch": 3, "top1_selected": 50.0, "top5_selected": 90.0}
    for lr in (0.1, 0.2):
        config = config_of(*PLAIN, f"recipe.lr={lr}", "dataset.validation=0.1")
        own = {"val_top1_last": 70 + 100 * lr, "val_top1_selected": 90.0}
        write_run(tmp_path / "outputs", config, **split, **own)
    runs = read_runs(tmp_path / "outputs")
    assert draw_runs(runs_table(runs), runs, tmp_path / "plot.png")
    assert "validation top-1 after the last epoch [%]" in drawn_texts["plot"]


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr("sys.argv", ["runs.py", *map(str, args)])
    try:
        script.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_script_prints_the_table_and_writes_numbers(tmp_path: Path, monkeypatch, capsys):
    outputs = tmp_path / "outputs"
    runs_of(outputs, [*PLAIN, "recipe.lr=0.1"], [*PLAIN, "recipe.lr=0.2"])
    csv, plot = tmp_path / "x.csv", tmp_path / "plot.png"
    assert call(monkeypatch, outputs, "--csv", csv, "--plot", plot, "--against", "lr=0.1") == 0
    out = capsys.readouterr().out
    assert re.search(r"\| lr +\| +n \| +last \| +best \| .* difference \|", out)
    assert "difference, p: of last, by a two-sided paired t-test" in out
    assert f"written to {csv}\nwritten to {plot} and .pdf" in out
    numbers = pd.read_csv(csv)
    assert numbers.top1_last_mean.tolist() == [60.5, 63.5] and numbers.seeds.tolist() == ["0;1"] * 2
    assert call(monkeypatch, tmp_path / "nowhere") == 2
    assert call(monkeypatch, outputs, "--plot", "x.pdf") == 2
    assert "plot=x.pdf: must end in .png" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert call(monkeypatch, tmp_path / "empty") == 2
    assert "there are no runs in these folders" in capsys.readouterr().err


@pytest.mark.usefixtures("unevaluated")
def test_sweep_ends_with_its_table_and_plot(command: Command, tmp_path: Path):
    args = ["augmentation.htm.tau=0.5,inf", "seed=0,1", "recipe.max_steps=2", *SMALL]
    result = command("train", "-m", *args)
    assert result.status == 0
    table = result.out.partition("\n\n")[2]
    assert re.search(
        r"^\| inf +\| +2 \| 10\.00 \+/- 0\.00 \|.*\| +100\.0 \| +\d+\.\d \| finished", table, re.M
    )
    assert result.out.rstrip().endswith("4 of 4 runs are finished")
    report = tmp_path / "outputs/report"
    assert {path.name for path in report.iterdir()} == {"tau.csv", "tau.png", "tau.pdf"}
    names = [path.name for path in (tmp_path / "outputs").glob("cct_*")]
    assert len(names) == 4 and all("-tau=" in name and "-limit=60-" in name for name in names)


def test_settings_of_a_launcher_are_not_in_the_name_of_a_run():
    """Its processes do not know them; a sweep's end looks for the folders that they made."""
    launcher = ["hydra/launcher=parallel", "hydra.launcher.n_jobs=2"]
    names = [
        resolve(compose("train", [*words, "augmentation.htm.tau=1"])).name
        for words in (launcher, [])
    ]
    assert names[0] == names[1] and "-tau=1-s0-" in str(names[0])


@pytest.mark.usefixtures("unevaluated")
def test_failed_point_is_shown_in_the_table(command: Command, tmp_path: Path):
    args = ["recipe.lr=0.001,1e30", "recipe.clip_grad_norm=null", "recipe.max_steps=3", *SMALL]
    result = command("train", "-m", "augmentation=[]", "recipe.optimizer=sgd", *args)
    assert result.status == 1
    assert "seed 0 failed" in result.out and "1 of 2 runs are finished" in result.out


@pytest.mark.usefixtures("unevaluated")
def test_resume_auto_finds_an_equal_run_under_any_name(command: Command, tmp_path: Path):
    args = ["resume=auto", "augmentation.htm.tau=1", "recipe.max_steps=2", *SMALL]
    assert command("train", *args).status == 0
    (run,) = (tmp_path / "outputs").glob("cct_*")
    run.rename(run.with_name("mine"))
    again = command("train", *args)
    assert again.status == 0 and again.out.startswith("mine: top-1 10.00 %")
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["mine"]
    other = command("train", *args, "seed=1", "name=2026_11_26")  # for Hydra a number
    names = {path.name for path in (tmp_path / "outputs").iterdir()}
    assert other.status == 0 and names == {"mine", "2026_11_26"}
