"""Prints how much each tau and rho would mix, on real batches of a run with HTM: run=FOLDER."""

from rich.table import Table

from reproduction.reporting.suggestions import QUANTILES, Layer, suggestions
from reproduction.runs.folder import RunFolder
from reproduction.runs.parse import parse_saved
from reproduction.system.terminal import Parser, one_line_errors, positive, print_tables
from reproduction.training.endings import explaining_data


def tables(layer: Layer) -> list[Table]:
    """Quantiles, samples by tau, tokens by rho; the run's own values are marked."""
    title = f"layer {layer.layer}: tau = {layer.tau:g}, rho = {layer.rho:g}"
    quantiles = Table("", *(f"{q:.0%}" for q in QUANTILES), title=title)
    quantiles.add_row("difficulty in nats", *(f"{x:.3f}" for x in layer.difficulty))
    quantiles.add_row("saliency of donor - own", *(f"{x:+.5f}" for x in layer.difference))
    return [
        quantiles,
        _shares("tau", "easy samples", layer.samples, layer.tau),
        _shares("rho", "tokens replaced in each", layer.tokens, layer.rho),
    ]


def _shares(name: str, label: str, shares: dict[float, float], own: float) -> Table:
    table = Table(name, *(f"{value:g}{' *' * (value == own)}" for value in shares))
    table.add_row(label, *(f"{share:.1%}" for share in shares.values()))
    return table


@one_line_errors("suggest.py")
@explaining_data()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="run=FOLDER", help="folder of a trained run with HTM")
    parser.add_argument("--batches", type=positive, default=8, help="batches to use (default: 8)")
    args = parser.parse_args()
    folder = RunFolder(args.run.removeprefix("run="))
    for layer in suggestions(folder, parse_saved(folder.read_config()), args.batches):
        print_tables(*tables(layer))
    print(
        "*: the run's own. Tokens are counted at its tau, or over all samples if none is easy; "
        "pairs are matched anew for each rho."
    )


if __name__ == "__main__":
    main()
