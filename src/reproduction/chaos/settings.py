"""What must not change a result: workers that load, and a logger."""

from reproduction.chaos.compare import differences
from reproduction.chaos.runs import Outcome, Place

SAME = {
    "workers-1": ("dataset.workers=1",),
    "workers-3": ("dataset.workers=3",),
    "wandb": ("logger=wandb", "logger.mode=offline"),
    "wandb-workers-2": ("logger=wandb", "logger.mode=offline", "dataset.workers=2"),
}


def vary_settings(place: Place) -> Outcome:
    """Trains one run with each of them, and compares all with the one without any."""
    found = []
    for name, args in {"workers-0": (), **SAME}.items():
        if status := place.run(name, "recipe.epochs=4", *args):
            found.append(f"{name}: status {status}: {place.errors(name)[-300:]}")
        elif args:
            found += differences(place.folder(name), place.folder("workers-0"))
    return Outcome("0, 1, 3 workers; with and without wandb", {"runs": 1 + len(SAME)}, found)
