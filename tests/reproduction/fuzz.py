"""Hypothesis strategies for mistyped command lines, and the checks that all of them must pass."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from hypothesis import strategies as st

from reproduction.config import CONF_DIR
from reproduction.runs.compose import compose
from reproduction.runs.identity import flatten
from reproduction.start.command import run
from tests.reproduction.conftest import SCRIPTS, snapshot

GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
OPTIONS = {
    group: sorted(
        str(path.relative_to(CONF_DIR / group).with_suffix(""))
        for path in (CONF_DIR / group).rglob("*.yaml")
    )
    for group in GROUPS
}
# One value of each problematic kind: not numeric, not finite, huge, empty, unprintable, ...
NUMBERS = [
    *("", "null", "true", "0", "1", "-1", "2", "3", "0.5", "-0.5", "1e308", "1e400", "1e-400"),
    *("nan", "inf", "-inf", "1_000", "0x10", "1e8", "100000000", "1000000000", "1" + "0" * 30),
]
LISTS = [
    *("[]", "[1]", "[1,2]", "[1,2,3]", "[[1]]", "[null]", "[nan,inf,1]", "{}", "{a:1}"),
    *("{a:{b:[1]}}", "[" * 40 + "]" * 40, "[1,2", "{a:1", "[a", "0,1", "x,y"),
]
WORDS = [
    *("auto", "cpu", "cuda", "never", "none", "best", "typo", "a" * 300, "a b", "\\", "\\\\"),
    *("'", '"', "''", "'a", '"a"', "'\\'", "a\\,b", "=", "==", "a=b", "%", "%s", "{0}", "<a>"),
    *("../x", "..", ".", "/", "/dev/null", "/proc/self", "~", "~/x", "a/b", "a\\b", "$"),
    *("\n", "a\nb", "\t", "\x00", "\x1b[31m", "\x7f", "\u2028", "\u202e", "\udcff", "\xe9\u4e2d"),
]
CALLS = [
    *("${nope}", "${seed}", "${recipe.epochs}", "${recipe}", "${oc.env:HOME}", "${oc.env:NOPE}"),
    *("${hydra:runtime.cwd}", "${now:%Y}", "${oc.decode:x}", "${share:1,0}", "${share:}"),
    *("${cores:x}", "${cores:${cores:1}}", "${", "${}", "${a", "\\${seed}", "${oc.select:x,3}"),
    *("${.}", "${..seed}", "${oc.create:{a:1}}", "${oc.dict.keys:recipe}", "???", "range(3)"),
    *("choice(1,2)", "glob(*)", "sort(3,2,1)", "shuffle(1,2)", "interval(0,1)", "int(3.5)"),
    *("float(x)", "str(3)", "bool(7)", "json_str(1)", "tag(a,1)", "extend_list(1)", "typo(1)"),
]
ODD = [*NUMBERS, *LISTS, *WORDS, *CALLS]
ODD_KEYS = [
    *("a.b", ".", "..", "a..b", "@", "model@x", "recipe@", "0", "recipe.0", "hydra.x", "hydra"),
    *("defaults", "_self_"),
]
OPTIONS_OF_HYDRA = [
    *("-m", "--multirun", "--sweep", "--cfg", "--cfg=job", "--resolve", "--info", "--package=x"),
    *("--config-name=eval", "--config-path=/", "--config-dir=/", "-cn", "-x", "--", "-", "--run"),
    *("--experimental-rerun=x", "--shell-completion", "-sc", "hydra.run.dir=x", "hydra=x"),
    *("hydra.sweep.dir=x", "hydra/sweeper=basic", "hydra/sweeper=typo", "hydra/launcher=typo"),
    *("hydra/output=default", "hydra.launcher.n_jobs=2", "hydra.sweeper.max_batch_size=x"),
    *("hydra.mode=MULTIRUN", "hydra.job.chdir=true", "hydra/job_logging=default"),
    *("hydra.verbose=true", "hydra/help=default"),
]


class Outcome(NamedTuple):
    """The status and stderr of a command, and the settings `built` for its points."""

    status: int
    err: str
    built: list[Any]


def known_keys() -> list[str]:
    """Returns every key of each kind of model, data set and logger, and the groups themselves."""
    full_stack = "augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]"
    keys: dict[str, None] = {}
    for model in ("model=cct_7_3x1", "model=vit_tiny_patch16_224", "model=resnet18"):
        stack = full_stack if model != "model=resnet18" else "augmentation=[]"
        raw = compose("export", [model, "logger=wandb", stack, "dataset=cifar10"]).raw
        for key, _ in flatten(raw):
            parts = key.split(".")
            keys.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return list(keys)


KEYS = known_keys()


def values() -> st.SearchStrategy[str]:
    odd = st.sampled_from(ODD)
    text = st.text(st.characters(), max_size=8)
    return st.one_of(odd, odd, st.integers().map(str), st.floats().map(str), text)


def choices() -> st.SearchStrategy[str]:
    """Assigns a group one option, a list of options, or an odd value."""
    one = {group: st.sampled_from(options or ["x"]) for group, options in OPTIONS.items()}
    return st.sampled_from(GROUPS).flatmap(
        lambda group: st.one_of(
            one[group].map(lambda option: f"{group}={option}"),
            st.lists(one[group]).map(lambda options: f"{group}=[{','.join(options)}]"),
            values().map(lambda value: f"{group}={value}"),
        )
    )


def overrides() -> st.SearchStrategy[str]:
    """One argument: mostly a known key with an odd value, else a group, prefix or Hydra option."""
    known = st.sampled_from([*KEYS, *GROUPS])
    odd = st.one_of(st.sampled_from(ODD_KEYS), known.map(lambda key: f"{key}x"), st.text())
    several = st.lists(st.sampled_from(ODD), max_size=4).map(",".join)
    prefix = st.sampled_from(["+", "++", "~", "-", "+++"])
    assigned = st.builds("{}={}".format, known, values())
    return st.one_of(
        assigned,
        assigned,
        choices(),
        st.builds("{}={}".format, known, several),
        st.builds("{}={}".format, odd, values()),
        st.builds("{}{}={}".format, prefix, st.one_of(known, odd), values()),
        st.builds("{}{}".format, prefix, known),
        known,
        st.sampled_from(OPTIONS_OF_HYDRA),
    )


def command_lines() -> st.SearchStrategy[list[str]]:
    return st.lists(overrides(), min_size=1, max_size=4)


def attempt(script: str, arguments: list[str]) -> Outcome:
    """Runs a command in this process, except for its actual work."""
    resolve, check_all, *_ = SCRIPTS[script]
    built: list[Any] = []
    err = io.StringIO()
    argv = patch.object(sys, "argv", [f"{script}.py", *arguments])
    with argv, redirect_stderr(err), redirect_stdout(io.StringIO()):
        try:
            run(script, resolve, check_all, built.append)
        except SystemExit as end:
            status = int(end.code or 0)
    return Outcome(status, err.getvalue(), built)


def check(script: str, arguments: list[str], folder: Path) -> Outcome:
    """Asserts that a command builds, or fails with one line, status 2 and an unchanged folder."""
    before = snapshot(folder)
    result = attempt(script, arguments)
    if result.status == 0:  # Hydra may have written the folder of a sweep
        assert result.built or any(a.startswith("-") for a in arguments), "did nothing"
        return result
    assert result.status == 2, result
    assert snapshot(folder) == before, "changed the disk"
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith(f"{script}.py: "), result.err
    assert result.err.rstrip("\n").isprintable(), result.err
    assert len(result.err) < 2100, len(result.err)
    return result
