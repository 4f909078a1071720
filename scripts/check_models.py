"""Tries TokenMixup on the smallest model of every family of timm's that it serves.

One training step with HTM, VTM and manifold mixup, then evaluation against the plain model. Models
of more than 450 million parameters are tried with 3 of their blocks. Ends with status 1 if one
fails, or if docs/models.md is not of this timm and this library.
"""

import sys
import time

import timm

from reproduction.models.survey import PAGE, page_of, smallest_of_families, survey, try_out

LARGEST = 450e6


def main() -> int:
    verdicts = survey(timm.list_models())
    served = [verdict for verdict in verdicts if verdict.reason is None]
    failed = 0
    tried = smallest_of_families(verdicts)
    for verdict in tried:
        start = time.perf_counter()
        blocks = 3 if verdict.parameters > LARGEST else None
        try:
            try_out(verdict.name, blocks)
            outcome = "ok"
        except Exception as error:
            outcome = f"FAILED, {type(error).__name__}: {error}"
            failed += 1
        seconds = time.perf_counter() - start
        how = "" if blocks is None else f", {blocks} blocks"
        print(f"{verdict.family}: {verdict.name}{how}: {outcome} ({seconds:.1f} s)", flush=True)
    count = f"{len(served)} of {len(verdicts)}"
    print(f"{len(tried)} families tried, {failed} failed; served are {count} models")
    if PAGE.read_text() != page_of(verdicts):
        print(f"check_models.py: {PAGE} is old: scripts/list_models.py --page", file=sys.stderr)
        return 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
