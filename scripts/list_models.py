"""Lists the timm models that TokenMixup supports, or the sizes of the paper's models."""

import sys
import time

import timm

from reproduction.models.survey import (
    PAGE,
    Verdict,
    count_of,
    page_of,
    smallest_of_families,
    survey,
    try_out,
)
from reproduction.studies.sizes import sizes_table
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors

SUPPORTED = {True: "supported", False: "supported, HTM alone"}
LARGEST = 450e6  # parameters; larger models are tried with 3 blocks


def try_model(verdict: Verdict) -> bool:
    """Tries a training step, and evaluation against the plain model; returns and prints success."""
    start, blocks = time.perf_counter(), 3 if verdict.parameters > LARGEST else None
    try:
        try_out(verdict.name, blocks)
        outcome = "ok"
    except Exception as error:
        outcome = f"FAILED, {type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    how = "" if blocks is None else f", {blocks} blocks"
    print(f"{verdict.family}: {verdict.name}{how}: {outcome} ({seconds:.1f} s)", flush=True)
    return outcome == "ok"


@one_line_errors("list_models.py")
def main() -> int:
    """Returns 1 if a model fails, docs/models.md is outdated or a size differs for no reason."""
    parser = Parser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="such as 'vit_*' (default: all)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--page", action="store_true", help=f"write docs/{PAGE.name}")
    mode.add_argument("--try", dest="tries", action="store_true", help="train one of each family")
    mode.add_argument("--sizes", action="store_true", help="count the models of Tables 1 and 2")
    args = parser.parse_args()
    if args.sizes:
        table, is_good = sizes_table()
        print(table)
        return int(not is_good)
    names = timm.list_models("" if args.page or args.tries else args.pattern)
    if not names:
        raise UserError(f"{args.pattern}: timm has no such model")
    verdicts = survey(names)
    status = 0
    if args.page:
        write_text(PAGE, page_of(verdicts))
        print(f"written to {PAGE}")
    elif args.tries:
        failed = [one.name for one in smallest_of_families(verdicts) if not try_model(one)]
        is_outdated = PAGE.read_text() != page_of(verdicts)
        state = "outdated, see --page" if is_outdated else "current"
        print(f"{len(failed)} failed; {PAGE} is {state}")
        status = int(bool(failed) or is_outdated)
    else:
        for verdict in verdicts:
            print(f"{verdict.name}: {verdict.reason or SUPPORTED[verdict.takes_vtm]}")
    print(count_of(verdicts))
    return status


if __name__ == "__main__":
    sys.exit(main())
