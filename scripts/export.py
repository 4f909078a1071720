"""Exports the plain model of a run (run=FOLDER) or a file (checkpoint=FILE model=...)."""

from reproduction.start.command import run
from reproduction.start.resolve import WeightsTask, check_distinct, resolve_export
from reproduction.system.ranks import is_first_rank
from reproduction.system.terminal import say


def check_all(tasks: list[WeightsTask], here: bool) -> None:
    check_distinct("output", [task.result for task in tasks])


def main(settings: WeightsTask) -> None:
    """Writes `output`, with our parameter names for a CCT and timm's for a ViT."""
    from reproduction.training.checkpoint import export

    if is_first_rank():
        config = settings.config
        preprocessing = config.preprocessing if settings.is_run else None
        export(config.model, settings.checkpoints, settings.result, preprocessing)
        say(f"written to {settings.result}")


if __name__ == "__main__":
    run("export", resolve_export, check_all, main)
