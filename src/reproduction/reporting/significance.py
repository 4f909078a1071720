"""What the t-tests of a table say, in words."""

from collections.abc import Iterator, Sequence

from reproduction.reporting.measured import Measured
from reproduction.reporting.statistics import Comparison, holm

LEVEL = 0.05


def significance(records: Sequence[Measured], reference: str) -> Iterator[str]:
    """One note: which differences to `reference` are significant; none without a comparison."""
    compared = [(record, record.comparison) for record in records if record.comparison is not None]
    names = _names([record for record, _ in compared])
    tested = [(name, test) for name, (_, test) in zip(names, compared, strict=True)]
    found = [(name, test, test.p) for name, test in tested if test.p is not None]
    sentences = list(_verdicts(found, reference)) if found else []
    reasons: dict[str, list[str]] = {}
    for name, test in tested:
        if test.reason is not None:
            reasons.setdefault(test.reason, []).append(name)
    sentences += [f"Without a test, {why}: {'; '.join(rows)}." for why, rows in reasons.items()]
    if sentences:
        yield " ".join(sentences)


def _verdicts(found: Sequence[tuple[str, Comparison, float]], reference: str) -> Iterator[str]:
    """The tests that were made, and what is left of them for being so many."""
    corrected = holm([p for _, _, p in found])
    lists = {True: list[str](), False: list[str]()}
    for name, test, p in found:
        lists[p < LEVEL].append(f"{name} {test.difference:+.2f} (p = {p_text(p)})")
    yield f"Significant at 5 % against {reference}: {'; '.join(lists[True]) or 'none'}."
    yield f"Not significant: {'; '.join(lists[False]) or 'none'}."
    kept = [name for (name, _, _), p in zip(found, corrected, strict=True) if p < LEVEL]
    tests = f"{len(found)} test{'s' if len(found) > 1 else ''}"
    yield f"{tests}; by Holm's correction significant: {'; '.join(kept) or 'none'}."


def p_text(p: float) -> str:
    """Three digits after the point, or two significant ones where those would be zeros."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def _names(records: Sequence[Measured]) -> list[str]:
    """Rows, with their column where there are several."""
    several = len({record.column for record in records}) > 1
    return [f"{r.label} on {r.column}" if several else r.label for r in records]
