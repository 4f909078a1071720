"""Numbers, settings and the lines of a table as text, made of them at the very end."""

import math
from typing import Any

import pandas as pd

from reproduction.studies.lines import Line
from reproduction.studies.results import ON_TEST, ON_VALIDATION, OUTCOMES, Outcome

NOTHING = "-"
ACCURACIES = {  # beside those after the last epoch
    "median [%]": "top1_median10",
    "best [%]": "top1_best",
    "best of 10 [%]": "top1_best10",
    "selected [%]": "top1_selected",
}


def number(value: float | None, spec: str) -> str:
    """Formats a number; a dash stands for one that is missing."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:{spec}}"


def spread(mean: float, deviation: float, spec: str) -> str:
    """Formats a mean with its deviation, which a single value has not."""
    if math.isnan(mean) or math.isnan(deviation):
        return number(mean, spec)
    return f"{mean:{spec}} +/- {deviation:{spec}}"


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    if p < 0.001:
        return f"{p:.1e}"
    return number(p, ".3f")


def value_text(value: Any) -> str:
    """Formats a setting as on the command line, and a missing one as a dash."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.10g}"
    return short if float(short) == value else repr(value)  # two values never look alike


# --- a line as text -----------------------------------------------------------------------------


def columns_of(line: Line, is_tested: bool) -> dict[str, str]:
    """Returns a line by the titles of its columns, which are those of all lines of its section.

    The section of what is tested has more columns, which are the same for any outcome.
    """
    outcome = OUTCOMES[line.outcome]
    found = {**line.entry.heads, "n": str(line.n)}
    found |= _judged(line, outcome)
    found |= _compared(line, outcome)
    if is_tested:
        found |= _tested(line)
    if outcome.measure == "loss":
        found["lower in"] = _lower_in(line)
    if is_tested:
        found |= _once(line)
    return found


def _judged(line: Line, outcome: Outcome) -> dict[str, str]:
    found = {f"{outcome.title} [{outcome.unit}]": spread(line.mean, line.std, outcome.spec)}
    if line.outcome == ON_VALIDATION:
        on_test = line.values(ON_TEST)
        found["test top-1 [%]"] = spread(on_test.mean(), on_test.std(), outcome.spec)
    found["paper [%]"] = number(line.entry.printed.get(outcome.measure), ".2f")
    found["mixed [%]"] = mixed(line)
    return found


def mixed(line: Line) -> str:
    """Formats the share of mixed samples, and says so if none was, or no token was replaced."""
    share = line.mean_of("mixed_share")
    if not line.runs or "htm" not in line.runs[0].stack.split("+"):
        return NOTHING
    text = number(100 * share, ".1f")
    if share == 0:
        return f"{text} (mixed nothing)"
    if line.mean_of("mixed_tokens") == 0:
        return f"{text} (replaced no token)"
    return text


def _compared(line: Line, outcome: Outcome) -> dict[str, str]:
    titles = ("compared with", "pairs", f"difference [{outcome.gap}]", "95 % interval")
    test, spec = line.test, f"+{outcome.spec}"
    if test is None:
        return dict.fromkeys(titles, NOTHING)
    interval = NOTHING
    if not math.isnan(test.low):
        interval = f"{test.low:{spec}} to {test.high:{spec}}"
    texts = (line.entry.against_text, str(test.pairs), number(test.difference, spec), interval)
    return dict(zip(titles, texts, strict=True))


def _lower_in(line: Line) -> str:
    if line.test is None:
        return NOTHING
    return f"{line.test.below} of {line.test.pairs}"


def _tested(line: Line) -> dict[str, str]:
    corrected = p_text(line.p_holm)
    if line.entry.role:
        corrected = line.entry.role
    return {"p": p_text(line.p), "p (Holm)": corrected}


def _once(line: Line) -> dict[str, str]:
    accuracies = {title: number(line.mean_of(x), ".2f") for title, x in ACCURACIES.items()}
    return {
        "paper's [points]": number(line.entry.printed_difference, "+.2f"),
        **accuracies,
        "tokens": number(line.mean_of("mixed_tokens"), ".1f"),
        "hours": number(line.n * line.mean_of("seconds") / 3600, ".1f"),
        "status": line.entry.state or NOTHING,
    }


def judged_on(outcome: str) -> list[str]:
    """Says above a table that it is judged on validation."""
    if OUTCOMES[outcome].half == "test":
        return []
    text = "Judged on the validation split"
    if outcome == ON_VALIDATION:
        text += "; the accuracy on the test set stands beside it, untested"
    return [f"{text}."]
