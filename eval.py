"""Evaluates a run (run=FOLDER) or a weight file (checkpoint=FILE model=... dataset=...)."""

from reproduction.start.command import run
from reproduction.start.resolve import WeightsTask, check_distinct, resolve_evaluation
from reproduction.system.ranks import is_first_rank
from reproduction.system.terminal import say


def check_all(tasks: list[WeightsTask], here: bool) -> None:
    check_distinct("predictions", [task.predictions for task in tasks])


def main(settings: WeightsTask) -> None:
    """Evaluates, prints and writes top-1, top-5 and loss, and the predictions if asked for."""
    from reproduction.training.evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(
        settings.config,
        settings.checkpoints,
        settings.result,
        settings.predictions,
        settings.images,
    )
    if not is_first_rank():
        return
    if settings.images is not None:
        say(f"{result['checkpoint']}: {result['images']} images of {settings.images}")
        say(f"written to {settings.predictions}")
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
    if settings.predictions is not None:
        from reproduction.reporting.figures import draw_confusion
        from reproduction.training.predictions import table_path

        picture, table = draw_confusion(settings.result), table_path(settings.result, "classes")
        say(f"written to {settings.predictions}, {table} and {picture}")


if __name__ == "__main__":
    run("eval", resolve_evaluation, check_all, main)
