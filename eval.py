"""Evaluates a run (run=FOLDER) or a file (checkpoint=FILE model=... dataset=...)."""

from reproduction.commands.cli import run
from reproduction.commands.evaluation import Evaluation, resolve
from reproduction.system.ranks import is_first_rank
from reproduction.system.stdout import say


def main(settings: Evaluation) -> None:
    """Prints and writes top-1, top-5 and loss."""
    from reproduction.commands.evaluate_checkpoint import evaluate_checkpoint

    result, path = evaluate_checkpoint(settings)
    if not is_first_rank():
        return
    say(
        f"{result['checkpoint']}: top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} %, "
        f"loss {result['eval_loss']:.4f} on {result['images']} images of {result['dataset']}"
    )
    say(f"written to {path}")


if __name__ == "__main__":
    run("eval", resolve, lambda settings, here: None, main)
