"""Writes the paper's tables, sweeps and figures with our results; docs/results.md; a line of it."""

from pathlib import Path

from reproduction.studies.study import FULL, SCALES
from reproduction.system import Parser, one_line_errors, say, write_text


@one_line_errors("report.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides of all rows")
    parser.add_argument("--scale", choices=SCALES, default=FULL)
    parser.add_argument("--outputs", type=Path, help="folder of the runs (default: of the scale)")
    parser.add_argument("--results", type=Path, help="write docs/results.md beside this folder")
    parser.add_argument(
        "--publish", type=Path, nargs=2, metavar=("RUN", "FILE.jsonl"), help="add a line to a file"
    )
    args = parser.parse_args()
    if args.publish and args.publish[1].suffix != ".jsonl":
        parser.error(f"--publish {args.publish[1]}: must be results/STUDY.jsonl")
    if args.words and (args.publish or args.results):
        parser.error(f"{args.words[0]}: nothing reads it beside --publish or --results")
    from reproduction.studies import page

    if args.publish:
        page.publish(*args.publish)
    elif args.results:
        path = args.results.resolve().parent / "docs" / "results.md"
        write_text(path, page.results_page(args.results))
        say(f"written to {path}")
    else:
        outputs = args.outputs or Path("outputs", "" if args.scale == FULL else args.scale)
        say(str(page.write_page(outputs, args.scale, args.words)))


if __name__ == "__main__":
    main()
