"""Looks into a trained run with HTM: what each tau and rho would mix, on batches of its images."""

from reproduction.compose import check_asked
from reproduction.errors import Parser, one_line_errors, say
from reproduction.folder import RunFolder
from scripts import positive


@one_line_errors()
def main() -> None:
    """Prints, for each HTM layer, quantiles, samples by tau and tokens by rho."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a trained run with HTM")
    parser.add_argument(
        "word", metavar="dataset.source=...", nargs="?", help="the function of a run on own data"
    )
    parser.add_argument("--batches", type=positive, default=8, help="to count over (default: 8)")
    args = parser.parse_args()
    if args.word and not args.word.startswith("dataset.source="):
        parser.error(f"{args.word}: must be dataset.source=...")
    folder = RunFolder(args.run.removeprefix("run="))
    config = folder.read_config()
    check_asked(config, [args.word or ""], "dataset.source")
    from reproduction.reporting.suggestions import suggestions
    from reproduction.training.stop import ending

    try:
        for text in suggestions(folder, config, args.batches):
            say(text)
    except Exception as error:
        raise ending(error, config) from error
    say("\n*: the run's own, at whose tau tokens are counted; pairs are matched anew for each rho.")


if __name__ == "__main__":
    main()
