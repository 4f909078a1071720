"""Adds the line of a finished run to results/."""

from pathlib import Path

from reproduction.config import ROOT
from reproduction.system.terminal import Parser, one_line_errors


@one_line_errors("publish.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of lines")
    args = parser.parse_args()
    from reproduction.studies.publish import publish

    print(f"written to {publish(args.run, args.results)}")


if __name__ == "__main__":
    main()
