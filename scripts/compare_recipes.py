"""Writes the table of the recipes' values beside the published ones into docs/differences.md."""

import argparse
from pathlib import Path

from reproduction.reporting.recipes import as_table, compare_recipes, read_recipes
from reproduction.storage import write_text

PAGE = Path(__file__).parents[1] / "docs" / "differences.md"
BEGIN, END = "<!-- written by scripts/compare_recipes.py -->\n\n", "\n<!-- end -->\n"


def page_with(table: str) -> str:
    """The page with `table` between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS).parse_args()
    settings = compare_recipes(read_recipes())
    write_text(PAGE, page_with(as_table(settings)))
    differing = sum(not setting.is_equal for setting in settings)
    print(f"{PAGE.name}: {len(settings)} settings, of which {differing} differ, with their reasons")


if __name__ == "__main__":
    main()
