"""Numbers, settings and the lines of a table as text, made of them at the very end."""

import math
from typing import Any

import pandas as pd

from reproduction.studies.lines import Line
from reproduction.studies.results import ON_TEST, ON_VALIDATION, Outcome

NOTHING = "-"
ACCURACIES = {  # beside those after the last epoch
    "median [%]": "top1_median10",
    "best [%]": "top1_best",
    "best of 10 [%]": "top1_best10",
    "selected [%]": "top1_selected",
}


def formatted(value: float | None, spec: str) -> str:
    """Formats a number; a dash stands for one that is missing."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:{spec}}"


def spread(values: pd.Series, spec: str) -> str:
    """Formats a mean with its deviation, which a single value has not."""
    mean = formatted(values.mean(), spec)
    if len(values) < 2:
        return mean
    return f"{mean} +/- {values.std():{spec}}"


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    if p < 0.001:
        return f"{p:.1e}"
    return formatted(p, ".3f")


def value_text(value: Any) -> str:
    """Formats a setting as on the command line, and a missing one as a dash."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if pd.isna(value):
        return NOTHING
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.10g}"
    return short if float(short) == value else repr(value)  # two values never look alike


# --- a line as text -----------------------------------------------------------------------------


def columns_of(line: Line) -> dict[str, str]:
    """Returns title -> text of each column; all lines of a section have the same titles."""
    outcome, comparison = line.outcome, line.comparison
    found = {**line.entry.heads, "n": str(line.n)}
    found[f"{outcome.title} [{outcome.unit}]"] = spread(line.judged, outcome.spec)
    if outcome == ON_VALIDATION:
        found["test top-1 [%]"] = spread(line.values(ON_TEST.name), ON_TEST.spec)
    found["paper [%]"] = formatted(line.printed, ".2f")
    for name in ("easy", "mixed"):  # samples, by HTM
        found[f"{name} [%]"] = share(line, name)
    found["compared with"] = line.entry.against_text or NOTHING
    found["pairs"] = formatted(comparison.pairs, ".0f")
    found[f"difference [{outcome.gap}]"] = formatted(comparison.difference, f"+{outcome.spec}")
    if line.is_main:
        found["paper's difference [points]"] = formatted(comparison.printed_difference, "+.2f")
    found["95 % interval"] = NOTHING
    if not math.isnan(comparison.low):
        ends = (comparison.low, comparison.high)
        found["95 % interval"] = " to ".join(f"{end:+{outcome.spec}}" for end in ends)
    if line.is_main:
        found["p"] = p_text(comparison.p)
        # "untested" or "primary" stands in place of the corrected p
        found["p (Holm)"] = line.entry.role or p_text(comparison.p_holm)
    if outcome.measure == "loss":
        found["lower in"] = NOTHING
        if line.entry.against is not None:
            found["lower in"] = f"{comparison.below} of {comparison.pairs}"
    if line.is_main:
        found |= _of_the_runs(line)
    return found


def _of_the_runs(line: Line) -> dict[str, str]:
    """Returns the columns that do not depend on the outcome: only the main section shows them."""
    found = {}
    for title, measure in ACCURACIES.items():
        found[title] = formatted(line.mean_of(measure), ".2f")
    found["tokens of easy"] = formatted(line.mean_of("easy_tokens"), ".1f")
    found["tokens of mixed"] = formatted(line.mean_of("mixed_tokens"), ".1f")
    found["hours"] = formatted(line.n * line.mean_of("seconds") / 3600, ".1f")
    found["status"] = line.entry.status_text or NOTHING
    return found


def share(line: Line, name: str) -> str:
    """Formats the share of easy or mixed samples; only HTM has some."""
    if not line.runs or "augmentation.htm.tau" not in line.runs[0].settings:
        return NOTHING
    return formatted(100 * line.mean_of(f"{name}_share"), ".1f")


def judged_on(outcome: Outcome) -> list[str]:
    """Says above a table that it is judged on validation."""
    if outcome.split == "test":
        return []
    text = "Judged on the validation split"
    if outcome == ON_VALIDATION:
        text += "; the accuracy on the test set stands beside it, untested"
    return [f"{text}."]
