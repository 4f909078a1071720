"""Adds the line of a finished run to the published results of its study: `make publish`."""

from pathlib import Path

from reproduction.errors import Parser, one_line_errors, say


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="as results/STUDY.yaml")
    args = parser.parse_args()
    from reproduction.studies.published import publish

    say(f"written to {publish(args.run, args.study)}")


if __name__ == "__main__":
    main()
