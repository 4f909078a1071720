"""Generates the pages of docs/ that come from code and data."""

import argparse

from reproduction.config import CONF_DIR, ROOT, Config
from reproduction.reporting.recipes import as_table, compare_recipes, read_recipes
from reproduction.reporting.reference import configuration_page
from reproduction.runs.compose import config_of
from reproduction.studies.publish import results_page
from reproduction.system.storage import write_text
from reproduction.system.terminal import one_line_errors

DOCS = ROOT / "docs"
CONFIGURATION, DIFFERENCES = DOCS / "configuration.md", DOCS / "differences.md"
RESULTS = DOCS / "results.md"
BEGIN, END = "<!-- written by scripts/write_docs.py -->\n\n", "\n<!-- end -->\n"
TABLES = ("table1", "table2", "published")  # folders of conf/experiment


def experiments() -> dict[str, Config]:
    """The composed experiments of Tables 1 and 2 and of the published code, by name."""
    folder = CONF_DIR / "experiment"
    paths = [path for name in TABLES for path in sorted((folder / name).glob("*.yaml"))]
    names = [str(path.relative_to(folder).with_suffix("")) for path in paths]
    return {name: config_of([f"experiment={name}"]) for name in names}


def differences_page() -> str:
    """docs/differences.md with a new table of recipes between its marks."""
    before, _, rest = DIFFERENCES.read_text().partition(BEGIN)
    table = as_table(compare_recipes(read_recipes(), experiments()))
    return before + BEGIN + table + END + rest.partition(END)[2]


@one_line_errors("write_docs.py")
def main() -> None:
    argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS).parse_args()
    pages = {
        CONFIGURATION: configuration_page(),
        DIFFERENCES: differences_page(),
        RESULTS: results_page(),
    }
    for path, text in pages.items():
        write_text(path, text)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
