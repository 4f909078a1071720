"""Counts parameters and MACs of every model in Tables 1 and 2: python scripts/model_stats.py."""

import sys

from reproduction.reporting.model_stats import as_table, differences, measure, read_paper
from reproduction.runs.compose import config_of
from reproduction.system.terminal import Parser, one_line_errors, print_tables


def main() -> int:
    """Prints the table; returns 1 if a figure of the paper differs for no known reason."""
    Parser(description=__doc__).parse_args()
    stats = [measure(row, config_of(row.command_line)) for row in read_paper()]
    print_tables(as_table(stats))
    return int(any(note is None for row in stats for _, note in differences(row)))


if __name__ == "__main__":
    with one_line_errors("model_stats.py"):
        sys.exit(main())
