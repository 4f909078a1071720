"""Writes the paper's tables, sweeps and figures with our results, from the run folders."""

from reproduction.studies.options import add_settings, settings_of
from reproduction.studies.overview import write_overview
from reproduction.system.terminal import Parser, one_line_errors


@one_line_errors("report.py")
def main() -> None:
    """Writes the files to report/ next to the runs and prints their paths."""
    parser = Parser(description=__doc__)
    add_settings(parser)
    print(*write_overview(settings_of(parser.parse_args())), sep="\n")


if __name__ == "__main__":
    main()
