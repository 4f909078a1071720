"""Writes docs/results.md from results/*.jsonl."""

from reproduction.config import ROOT
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors


@one_line_errors("write_docs.py")
def main() -> None:
    Parser(description=__doc__).parse_args()
    from reproduction.studies.publish import results_page

    path = ROOT / "docs" / "results.md"
    write_text(path, results_page())
    print(f"written to {path}")


if __name__ == "__main__":
    main()
