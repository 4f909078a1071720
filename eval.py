"""Evaluates a run (run=FOLDER) or a weight file (checkpoint=FILE model=... dataset=...)."""

from reproduction.commands.cli import run
from reproduction.commands.jobs import WeightsTask, resolve_evaluation
from reproduction.system.ranks import is_first_rank
from reproduction.system.terminal import say


def main(settings: WeightsTask) -> None:
    """Evaluates, prints and writes top-1, top-5 and loss."""
    from reproduction.training.evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(settings.config, settings.checkpoints, settings.result)
    if not is_first_rank():
        return
    place = ""
    if "step" in result:
        epochs = f"{result['epoch']} completed epoch{'s' * (result['epoch'] != 1)}"
        place = f" (step {result['step']}, {epochs})"
    say(
        f"{result['checkpoint']}{place}: "
        f"top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} %, "
        f"loss {result['eval_loss']:.4f} on {result['images']} images of {result['dataset']}"
    )
    say(f"written to {settings.result}")


if __name__ == "__main__":
    run("eval", resolve_evaluation, lambda settings, here: None, main)
