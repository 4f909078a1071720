"""Adds a finished run to results/, and writes a folder with its weights for a model hub."""

from pathlib import Path

from reproduction.config import ROOT
from reproduction.system.terminal import Parser, one_line_errors


@one_line_errors("publish.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--folder", type=Path, help="of weights (default: outputs/published/NAME)")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of lines")
    args = parser.parse_args()
    from reproduction.studies.publish import publish

    folder = args.folder or Path("outputs", "published", args.run.resolve().name)
    print(f"written to {publish(args.run, args.results, folder)}")
    print(f"written to {folder}; python eval.py checkpoint={folder}")


if __name__ == "__main__":
    main()
