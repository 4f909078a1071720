"""Writes the paper's tables, sweeps and figures with our results; or docs/results.md."""

from pathlib import Path

from reproduction.errors import Parser, one_line_errors, say
from reproduction.files import write_text
from reproduction.studies.study import FULL, SCALES, planned
from reproduction.sweep import Sweep
from scripts import positive


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of all rows")
    parser.add_argument("--study", default="all", help="as of reproduce.py (default: all)")
    parser.add_argument("--scale", choices=SCALES, default=FULL)
    parser.add_argument("--seeds", type=positive, help="how many (default: of the study)")
    parser.add_argument("--outputs", type=Path, help="folder of the runs (default: of the scale)")
    parser.add_argument("--results", type=Path, help="write docs/results.md beside this folder")
    args = parser.parse_args()
    if args.results:
        if args.overrides:
            parser.error(f"{args.overrides[0]}: nothing reads it beside --results")
        from reproduction.studies.published import results_page

        path = args.results.resolve().parent / "docs" / "results.md"
        write_text(path, results_page(args.results))
        say(f"written to {path}")
        return
    if args.outputs:
        if not args.outputs.is_dir():
            parser.error(f"--outputs {args.outputs}: must be a folder of runs")
        args.overrides.append(f"output_root={args.outputs}")
    sweep = Sweep(*planned(args.study, args.seeds, args.scale, args.overrides))
    sweep.write_tables()


if __name__ == "__main__":
    main()
