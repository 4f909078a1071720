"""Parameters and MACs of the models of Tables 1 and 2, counted here, beside the printed ones."""

from collections.abc import Iterator

import pandas as pd

from reproduction.config import Config
from reproduction.runs.compose import config_of
from reproduction.studies.study import Size, papers_studies

TOLERANCE = 0.005
CAPTION = (
    "MACs: one image in evaluation, half the FLOPs of torch's FlopCounterMode (convolutions, "
    "linear layers, attention matmuls); conv + linear: without the matmuls of attention. "
    f"matches: equal after rounding to the printed digits, or within {TOLERANCE:.1%}; for MACs, "
    "one of the two counts is enough."
)
Counts = tuple[int, int, int]  # parameters, MACs of one image, MACs without attention's matmuls


def printed_sizes() -> dict[tuple[str, str], Size]:
    """Returns the printed sizes by study and row, in the paper's order."""
    studies = papers_studies().items()
    return {(name, row): size for name, study in studies for row, size in study.sizes.items()}


def count(size: Size, config: Config) -> Counts:
    """Builds the model of a row on the meta device and counts."""
    import torch  # here: reports use this module without torch

    from reproduction.models.build import (
        build_module,
        count_macs,
        count_parameters,
        without_weights,
    )

    with torch.device("meta"):
        module = build_module(without_weights(config.model), config.augmentation, size.classes)
    macs = count_macs(module.model, config.model.image_size)
    return count_parameters(module), *macs


def agrees(measured: float, printed: float) -> bool:
    """Whether `measured` rounds to the printed digits or lies within the tolerance."""
    digits = len(str(printed).partition(".")[2])
    return round(measured, digits) == printed or abs(measured / printed - 1) <= TOLERANCE


def differences(size: Size, counts: Counts) -> Iterator[tuple[str, str | None]]:
    """Yields each printed figure that does not agree, and the reason if it is known."""
    parameters, *both_macs = counts
    if size.parameters is not None and not agrees(parameters / 1e6, size.parameters):
        yield "parameters", size.parameters_note
    if size.macs is not None and not any(agrees(macs / 1e9, size.macs) for macs in both_macs):
        yield "MACs", size.macs_note


def verdict(size: Size, counts: Counts) -> str:
    """Says whether the printed figures match the model, and why if not."""
    if mismatches := list(differences(size, counts)):
        reasons = (f"{figure}, {note or 'for no known reason'}" for figure, note in mismatches)
        return f"differs: {'; '.join(reasons)}"
    if size.parameters is None and size.macs is None:
        return "nothing printed"
    if size.macs is not None and not agrees(counts[1] / 1e9, size.macs):
        return "matches, MACs by conv + linear"
    return "matches"


def sizes_table() -> tuple[str, bool]:
    """Counts all models anew; returns the table, and whether all agree and are as stored."""
    rows, is_good = [], True
    for (study, name), size in printed_sizes().items():
        config = config_of(size.command)
        counts = count(size, config)
        unknown = any(note is None for _, note in differences(size, counts))
        is_good &= counts == size.counted and not unknown
        stored = "" if counts == size.counted else f"; stored are {size.counted}"
        parameters, *macs = counts
        rows.append(
            {
                "table": study[-1],
                "row": name,
                "model": size.model,
                "pixels": str(config.model.image_size),
                "classes": f"{size.classes:,}",
                "params (M)": f"{parameters / 1e6:.4f}",
                "paper (M)": "-" if size.parameters is None else str(size.parameters),
                "MACs (G)": f"{macs[0] / 1e9:.4f}",
                "conv + linear": f"{macs[1] / 1e9:.4f}",
                "paper (G)": "-" if size.macs is None else str(size.macs),
                "verdict": verdict(size, counts) + stored,
            }
        )
    table = pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)
    return f"{table}\n\n{CAPTION}", is_good
