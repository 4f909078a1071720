"""Counts parameters and MACs of every model in Tables 1 and 2: python scripts/model_stats.py."""

import sys

from reproduction.studies.sizes import sizes_table
from reproduction.system.terminal import Parser, one_line_errors, say


def main() -> int:
    """Prints the table; returns 1 for a difference without a reason, or another stored count."""
    Parser(description=__doc__).parse_args()
    table, is_good = sizes_table()
    say(table)
    return int(not is_good)


if __name__ == "__main__":
    with one_line_errors("model_stats.py"):
        sys.exit(main())
