"""Prints a table of all runs in folders: what differs between them, accuracy, mixing, status."""

from pathlib import Path

from reproduction.errors import Parser, UserError, one_line_errors, say
from reproduction.files import write_text


@one_line_errors()
def main() -> None:
    """Groups the runs over seeds; the columns are the settings in which they differ."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("outputs")],
        metavar="FOLDER",
        help="of runs, or single runs (default: outputs)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the unrounded numbers")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="or .png: over the varied keys"
    )
    parser.add_argument(
        "--against", metavar="KEY=VALUE", help="test every row against the one with this value"
    )
    args = parser.parse_args()
    if args.plot and args.plot.suffix not in (".svg", ".png"):
        raise UserError(f"plot={args.plot}: must end in .svg or .png")
    from reproduction.studies.plots import draw
    from reproduction.studies.runs import read_runs
    from reproduction.studies.tables import runs_table

    table = runs_table(read_runs(*args.folders), args.against)
    say(table.markdown())
    if args.csv:
        write_text(args.csv, table.csv())
        say(f"written to {args.csv}")
    if args.plot:
        finished = table.numbers[table.numbers.n > 0]
        if finished.empty or not table.keys:
            raise UserError(f"plot={args.plot}: needs finished runs that differ in a key")
        draw(args.plot, finished, table.main, table.keys)
        say(f"written to {args.plot}")


if __name__ == "__main__":
    main()
