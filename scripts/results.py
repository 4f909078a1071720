"""Writes docs/results.md from the published results of the studies in results/.

`python -m scripts.publish` adds the line of a run to them.
"""

from pathlib import Path

from reproduction.errors import Parser, UserError, one_line_errors, say
from reproduction.files import write_text


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("results"),
        metavar="FOLDER",
        help="of studies and their results (default: results); the page is ../docs/results.md",
    )
    folder = parser.parse_args().folder.resolve()
    if not folder.is_dir():
        raise UserError(f"{folder}: must be a folder of studies")
    from reproduction.studies.published import results_page

    path = folder.parent / "docs" / "results.md"
    write_text(path, results_page(folder))
    say(f"written to {path}")


if __name__ == "__main__":
    main()
