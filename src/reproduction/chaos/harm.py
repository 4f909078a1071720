"""The part of `make chaos` that damages files of weights."""

from collections import Counter

from reproduction.chaos.files import harm_foreign, harm_own
from reproduction.chaos.originals import foreign_files, other_files, own_files
from reproduction.chaos.runs import Outcome, Place

OWN, FOREIGN = 500, 200


def harm_files(place: Place, seed: int) -> Outcome:
    """Reads damaged copies of our own files, and damaged and malicious ones of others."""
    found: list[str] = []
    counts: dict[str, object] = {}
    root = place.root
    try:
        own = harm_own(own_files(root / "run"), other_files(root / "others"), OWN, seed)
        counts |= _summed("own", own)
        foreign = harm_foreign(foreign_files(root / "foreign"), root, FOREIGN, seed)
        counts |= _summed("foreign", foreign)
    except AssertionError as error:
        found.append(str(error))
    return Outcome("damaged files", counts, found)


def _summed(whose: str, found: Counter[str]) -> dict[str, object]:
    """How many came to each end, over all kinds of harm."""
    sums: Counter[str] = Counter()
    for told, count in found.items():
        sums[f"{whose} {told.rpartition(': ')[2]}"] += count
    return dict(sums)
