"""Looks into a trained run with HTM: what each tau and rho would mix, on batches of its images."""

from reproduction.compose import check_asked, word_of
from reproduction.errors import Parser, one_line_errors, say
from reproduction.folder import RunFolder
from reproduction.identity import own_code
from scripts import positive


@one_line_errors()
def main() -> None:
    """Prints, for each HTM layer, quantiles, samples by tau and tokens by rho."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a trained run with HTM")
    words = "KEY=package.module:factory"
    parser.add_argument("words", metavar=words, nargs="*", help="code of your own that may run")
    parser.add_argument("--batches", type=positive, default=8, help="to count over (default: 8)")
    args = parser.parse_args()
    folder = RunFolder(args.run.removeprefix("run="))
    config = folder.read_config()
    code = {door.typed_key: path for door, path in own_code(config)}
    allowed = ", ".join(f"{key}={path}" for key, path in code.items()) or "it has none"
    for word in map(word_of, args.words):
        if code.get(word.key) != word.value_text:
            parser.error(f"{word.text}: must be code of the run: {allowed}")
    check_asked(config, args.words, "images", "model")
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
