"""Writes the paper's tables, sweeps and figures with our results, from the run folders."""

from reproduction.studies.options import add_settings, study_settings
from reproduction.system.terminal import Parser, one_line_errors, say


@one_line_errors("report.py")
def main() -> None:
    """Writes the files to report/ next to the runs and prints the path of the page."""
    parser = Parser(description=__doc__)
    add_settings(parser)
    settings = study_settings(parser.parse_args())
    from reproduction.studies.page import write_page

    page = write_page(settings)
    say(f"{len([*page.parent.iterdir()])} files in {page.parent}")
    say(str(page))


if __name__ == "__main__":
    main()
