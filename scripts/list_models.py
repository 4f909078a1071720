"""Prints which of timm's models TokenMixup serves, and why not the others: [PATTERN] [--page]."""

import timm

from reproduction.models.survey import PAGE, page_of, survey
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, ending_in_a_line


@ending_in_a_line("list_models.py")
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="as in 'vit_*'; all by default")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} of all of them")
    args = parser.parse_args()
    pattern = "" if args.page else args.pattern
    names = timm.list_models(pattern)
    if not names:
        raise UserError(f"{pattern}: timm has no such model")
    verdicts = survey(names)
    if args.page:
        write_text(PAGE, page_of(verdicts))
        print(f"written to {PAGE}")
        return
    for verdict in verdicts:
        print(f"{verdict.name}: {verdict.reason or 'served'}")
    served = [verdict for verdict in verdicts if verdict.reason is None]
    print(f"{len(served)} of {len(verdicts)} models are served, timm {timm.__version__}")


if __name__ == "__main__":
    main()
