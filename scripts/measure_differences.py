"""Measures the effects of the published rules on random saliency and on trained runs."""

from reproduction.reporting.differences import measure, random_batches, run_batches
from reproduction.runs.folder import RunFolder
from reproduction.runs.parse import parse_saved
from reproduction.system.terminal import Parser, one_line_errors
from reproduction.training.endings import explaining_data

RHO, KAPPA = 0.005, 3  # for random saliency, and for runs without VTM


def columns(runs: list[str]) -> dict[str, dict[str, float]]:
    """Title -> effect -> value."""
    table = {
        "random, 64 tokens": measure(random_batches(0), RHO, KAPPA),
        "random, 196 tokens and class token": measure(
            random_batches(0, t=196, prefix=1), RHO, KAPPA
        ),
    }
    for run in runs:
        folder = RunFolder(run)
        config = parse_saved(folder.read_config())
        batches = run_batches(folder, config)
        htm, vtm = config.augmentation.htm, config.augmentation.vtm
        assert htm is not None
        rho = htm.first.rho_for(batches[0].saliency.shape[1])
        table[folder.path.name] = measure(batches, rho, vtm.first.kappa if vtm else KAPPA)
    return table


@one_line_errors("measure_differences.py")
@explaining_data()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run with HTM")
    table = columns(parser.parse_args().runs)
    print(f"| effect | {' | '.join(table)} |")
    print("|---|" + "---:|" * len(table))
    for effect in dict.fromkeys(key for column in table.values() for key in column):
        values = (column.get(effect) for column in table.values())
        print(f"| {effect} | {' | '.join('' if v is None else f'{v:.3g}' for v in values)} |")


if __name__ == "__main__":
    main()
