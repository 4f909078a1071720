"""One run, from its configuration to its summary: checked, built or resumed, and its `fit`.

The epochs are in fit.py, what ends a run in stop.py, its processes in ranks.py.
"""

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from reproduction.config import DATA, LOSS, MODEL, Config, door_of
from reproduction.data import loaders
from reproduction.data.halves import Data, in_memory
from reproduction.data.inputs import Mixed, build_training_inputs
from reproduction.data.seeding import preserved_generators
from reproduction.data.sources import opened, record
from reproduction.door import Door, Refused
from reproduction.errors import PlainError, Pulse, Stopped, UserError, reason_of, say, warn
from reproduction.folder import RunFolder, hold
from reproduction.identity import changes, files_of, flat, own_code, run_hash, saved
from reproduction.machine import git_revision, hardware_name, is_first_rank, local_ranks
from reproduction.models.build import (
    build_module,
    count_parameters,
    load_initial_weights,
    try_pass,
    without_weights,
)
from reproduction.models.weights import read_newest
from reproduction.training import metrics
from reproduction.training.checkpoint import Clock, save_plain
from reproduction.training.evaluate import build_metrics, gathers, try_metrics
from reproduction.training.fit import (
    Run,
    RunState,
    fit,
    progress_entries,
    restore,
    save_checkpoint,
    write_metrics,
)
from reproduction.training.loggers import Loggers
from reproduction.training.optimizers import build_optimizer
from reproduction.training.ranks import World, join_world, on_ranks, resolve_device
from reproduction.training.step import Trainer, build_loss
from reproduction.training.stop import Stop, handling
from tokenmixup import HTM, TokenMixup

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "scipy", "hydra-core")


def run_training(config: Config, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Trains one run, unless it is finished, and returns its summary, which records its `origin`.

    Raises UserError before the run begins, and PlainError or KeyboardInterrupt after the status is
    recorded in the folder.
    """
    folder = RunFolder.of(config)
    try:
        with hold(folder):
            folder.check(config)  # another process may have just begun it
            if folder.is_finished():
                return folder.read_summary()
            try:
                return on_ranks(partial(train, origin=origin), config)
            except KeyboardInterrupt as error:
                line = _record_end(folder, config, "interrupted", "interrupted")
                raise KeyboardInterrupt(line) from error
            except PlainError as error:  # what `ending` has made of any other
                raise PlainError(_record_end(folder, config, "failed", str(error))) from error
    except OSError as error:  # of the lock and the folder, before the run
        raise UserError(reason_of(error)) from error


def _record_end(folder: RunFolder, config: Config, status: str, reason: str) -> str:
    """Records the status of a run that has begun and returns the line to print; never raises."""
    if not folder.config_path.exists():
        return reason
    kept = f"kept as {status}"
    try:
        if is_first_rank():
            folder.write_summary(status=status, error=reason)
    except (OSError, UserError):  # such as a full disk; reports recognise the run by its lock
        kept = "kept as it is"
    return f"{reason}; {folder.path} is {kept}, {config.how_to_continue}"


def check_start(config: Config) -> None:
    """Raises UserError if the run cannot start here; writes nothing but downloaded data."""
    check_capture(config)
    data = opened(config.dataset)
    batches = loaders.TrainingBatches(config, len(data.train), rank=0, ranks=config.devices)
    classes = len(data.classes)
    trial = try_pass(config.model, config.augmentation, classes, own_code(config))
    mixed = try_inputs(config, classes)
    if LOSS.is_own(config.recipe.loss):
        try_loss(trial.module, mixed, config)
    try_metrics(config.recipe, classes)
    build_optimizer(trial.module.to_empty(device="cpu"), config.recipe)
    images = loaders.build_training_images(config, data.train)
    try:
        images[0, 0]  # epoch 0, image 0: raises if it is unreadable
    except PlainError as error:
        raise UserError(f"the first training image: {error}") from error
    count = config.recipe.grad_accum_steps
    fewest = batches.global_size(len(batches) - 1) // config.devices  # of a rank, in a batch
    if fewest < count:
        reason = f"some batches leave {fewest} images to a rank, allowed is 1..{fewest}"
        raise UserError(f"recipe.grad_accum_steps={count}: {reason}")


def try_inputs(config: Config, num_classes: int) -> Mixed:
    """Returns two random images as training gets them; UserError if a mixing of one's own fails."""
    inputs = build_training_inputs(config, torch.device("cpu"))
    size = config.model.image_size
    images = torch.randint(256, (2, 3, size, size), dtype=torch.uint8)
    classes = torch.arange(2) % num_classes
    for name, settings in config.augmentation.own.items():
        with Door(f"augmentation.{name}.source").refusing(settings.source):
            return inputs(images, classes, config.seed, 0, 0)
    return inputs(images, classes, config.seed, 0, 0)


def try_loss(module: TokenMixup, mixed: Mixed, config: Config) -> None:
    """Raises UserError if a loss of one's own fails on a batch, on the CPU."""
    recipe = config.recipe
    with LOSS.refusing(recipe.loss):
        loss = build_loss(recipe, torch.device("cpu"))
        output = module(mixed.images, mixed.targets(module.num_classes, recipe.label_smoothing))
        found = loss(output, mixed, 0)
        if not isinstance(found, torch.Tensor) or found.shape != () or not found.requires_grad:
            shape = getattr(found, "shape", type(found).__name__)
            raise Refused(f"returns {shape}, must return a scalar with a gradient")
        found.backward()
        trained = [name for name, x in module.named_parameters() if x.requires_grad]
        lost = [name for name in trained if module.get_parameter(name).grad is None]
        if lost and config.devices > 1:  # for which other ranks would wait
            reason = f"gives {len(lost)} parameters no gradient, such as {lost[0]}"
            raise Refused(f"{reason}; with devices={config.devices} each must have one")


def check_capture(config: Config) -> None:
    """Raises UserError for a CUDA graph of code that cannot be captured, or does not say so."""
    if config.compile != "cuda-graph":
        return
    for key, chosen in flat(asdict(config)):
        door = door_of(key)
        if door is None or key in (DATA.key, MODEL.key) or key.startswith("recipe.metrics."):
            continue
        with door.refusing(chosen):
            is_capturable = getattr(door.factory(chosen), "capturable", not door.is_own(chosen))
        if not is_capturable or key.startswith("augmentation.own."):  # which draws on the host
            rule = "cannot be captured; code of your own can if it says `capturable = True`"
            raise UserError(f"compile=cuda-graph {key}={chosen}: {rule}")


def train(config: Config, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Trains on this rank; the first rank writes the run folder.

    Returns the summary; on other ranks the results alone.
    """
    device = resolve_device(config.device, config.devices, config.recipe.precision)
    if config.compile:
        torch.compiler.reset()  # its limits count over all runs of a process
    with join_world(device) as world:
        run, state = set_up(config, world, origin)
        status = "failed"
        with handling(run.stop.request):
            try:
                results = fit(run, state)
                status = "finished"
            except Stopped:  # on all ranks after the same step
                write_metrics(run, state)  # first: the checkpoint counts their bytes
                if world.is_main:
                    say(f"stopping after step {run.trainer.step} (a second Ctrl-C: at once)")
                save_checkpoint(run, state)
                raise
            except Exception as error:
                error.add_note(f"after step {run.trainer.step}")
                raise
            finally:
                run.loggers.close(status)
        world.barrier()  # finished is what all ranks have finished
        if world.is_main:
            results = run.folder.write_summary(**results, status=status)
        return results


def set_up(config: Config, world: World, origin: Mapping[str, Any]) -> tuple[Run, RunState]:
    """Builds a run on its device, or resumes it, and prepares its folder.

    UserError if images, model or checkpoints do not fit the configuration.
    """
    folder = RunFolder.of(config)
    paths = folder.checkpoints()
    newest = read_newest(paths) if paths else None
    data = opened(config.dataset)
    batches = loaders.TrainingBatches(config, len(data.train), world.rank, world.size)
    model = config.model if newest is None else without_weights(config.model)
    torch.manual_seed(config.seed)  # the weights are drawn on the CPU: the same for every device
    module = build_module(model, config.augmentation, len(data.classes))
    initial_weights = load_initial_weights(model, module.model)
    trainer = Trainer(config, world, module, data.classes, len(batches))
    checkpoint = None
    state = RunState()
    if newest is not None:
        checkpoint, content = newest
        _check_same_run(checkpoint, content, config)
        state = restore(trainer, checkpoint, content)
    if world.broadcast(trainer.step) != trainer.step:
        raise PlainError("the ranks have read different checkpoints")
    facts: dict[str, Any] = {}
    if world.is_main:
        facts = _facts(trainer, data)
        if newest is None:  # a resumed run keeps what its beginning has recorded
            facts["initial_weights"] = initial_weights
            facts["starts"] = []
        else:
            facts["starts"] = folder.read_summary().get("starts", [])
        facts["starts"] += [_start(trainer)]
        facts |= origin
        _say_start(trainer, data, batches, facts)
    run = _assembled(trainer, folder, data, batches)
    # The folder last: what is refused above, such as a logger's settings, leaves it as it was.
    if world.is_main:
        folder.begin(config, checkpoint, state.metrics_size)
        if state.best is not None:
            save_plain(folder.best_path, state.best, trainer.classes)
        else:
            folder.best_path.unlink(missing_ok=True)
        folder.write_summary(**facts, **progress_entries(run, state), status="running", error=None)
    return run, state


def _check_same_run(path: Path, content: Mapping[str, Any], config: Config) -> None:
    """Raises UserError unless a checkpoint is of this run; the oldest hold no configuration."""
    if "config" not in content:
        return
    others = ", ".join(changes(config, saved(content["config"])))
    if others:
        raise UserError(f"checkpoint={path}: is of another run, this one has {others}")


def _assembled(
    trainer: Trainer, folder: RunFolder, data: Data, batches: loaders.TrainingBatches
) -> Run:
    """The parts of a run around its trainer; images are read, loggers begin."""
    config, world = trainer.config, trainer.world
    pin = world.device.type == "cuda"
    halves = ("train", "validation", "held_out")
    data = in_memory(data, halves, local_ranks(config.devices))
    evaluation_loader = partial(
        loaders.build_evaluation_loader, config, rank=world.rank, ranks=world.size, pin=pin
    )
    test_loader = None
    if data.validation is not None:
        test_loader = evaluation_loader(data.held_out)
    return Run(
        trainer=trainer,
        folder=folder,
        batches=batches,
        train_loader=loaders.build_training_loader(config, data.train, batches, pin),
        epoch_loader=evaluation_loader(data.per_epoch),
        test_loader=test_loader,
        loggers=Loggers(config.logger if world.is_main else {}, config, folder, trainer.step),
        stop=Stop(world.size),
        clock=Clock(config.checkpoint),
        batch_metrics=metrics.BatchMetrics(world),
        pulse=Pulse(),
        metrics=build_metrics(config.recipe),
    )


def _say_start(
    trainer: Trainer, data: Data, batches: loaders.TrainingBatches, facts: Mapping[str, Any]
) -> None:
    """Says what is trained, and which settings are allowed but probably mistakes."""
    config, world = trainer.config, trainer.world
    verb = f"resuming after step {trainer.step}" if trainer.step else "training"
    images = [
        f"{len(data.train):,} images of {config.dataset.name}",
        f"{len(data.classes):,} classes",
        f"{len(data.held_out):,} held out",
    ]
    if data.validation is not None:
        images.append(f"{len(data.validation):,} for validation")
    mixing = "+".join(config.augmentation.stack) or "no mixing"
    device = world.device.type
    if world.size > 1:
        device = f"{world.size} ranks on {device}"
    say(f"{verb}: {config.model.name} on {', '.join(images)}, {mixing}, {device}")
    left_out = len(data.train) - batches.epoch_images
    if left_out:
        others = f"{left_out:,} images that fill no batch of {config.recipe.batch_size}"
        say(f"each epoch leaves out {others}, other ones each time: recipe.drop_last=true")
    for remark in data.remarks:
        warn(f"warning: {remark}")
    gathering = [name for name, metric in build_metrics(config.recipe).items() if gathers(metric)]
    if gathering:
        size = 4 * len(data.held_out) * len(data.classes) / 1e6
        names = ", ".join(gathering)
        say(f"metrics: all logits are gathered for {names}, {size:.3g} MB in each evaluation")
    if facts.get("initial_weights") is not None:
        say(f"initial weights: {facts['initial_weights']}")
    for name, row in facts.get("htm", {}).items():
        say(f"htm: {name} = {', '.join(f'{float(x):.4g}' for x in row)}")
    if trainer.module.htm is not None and trainer.module.htm.difficulty == "paper":
        tau = min(map(float, facts["htm"]["tau"]))
        _say_difficulty(tau, len(data.classes), config.recipe.label_smoothing)


def _say_difficulty(tau: float, classes: int, smoothing: float) -> None:
    """Says between which numbers a useful tau lies, and if the least of all layers is below."""
    label = torch.full((classes,), smoothing / classes).double()
    label[0] += 1 - smoothing
    least = float(torch.special.entr(label).sum())
    say(f"htm: difficulty: at least {least:.4g} nats, {math.log(classes):.4g} of a guess")
    if tau <= least:
        reason = f"the difficulty of a sample is never below {least:.4g} nats"
        warn(f"warning: htm: with tau = {tau:.4g} no sample is easy: {reason}")


def _htm_numbers(trainer: Trainer, htm: HTM) -> dict[str, list[float | str]]:
    """HTM's tau, in nats, and rho at each layer, with numbers for `auto`; infinity as text."""
    model = without_weights(trainer.config.model)
    stack = trainer.config.augmentation
    with preserved_generators():  # only a pass tells how many tokens enter a layer
        classes, own = len(trainer.classes), own_code(trainer.config)
        mixes = try_pass(model, stack, classes, own).output.layers
    layers = [*zip(htm.by_layer.values(), mixes, strict=True)]
    return {
        "tau": [_finite(settings.tau) for settings, _ in layers],
        "rho": [_finite(settings.rho_for(mix.saliency.shape[1])) for settings, mix in layers],
    }


def _finite(number: float) -> float | str:
    return number if number < math.inf else "inf"


def _start(trainer: Trainer) -> dict[str, Any]:
    """The entry of the summary about a start of the run: from which step on, with what and where.

    On a CPU the weights are a function of the settings and these.
    """
    versions = {name: version(name) for name in LIBRARIES}
    return {
        "step": trainer.step,
        "git_revision": git_revision(),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware_name(trainer.world.device.type),
        "threads": torch.get_num_threads(),
    }


def _facts(trainer: Trainer, data: Data) -> dict[str, Any]:
    """The entries of the summary that are known before training."""
    config = trainer.config
    facts: dict[str, Any] = {
        "name": config.name,
        "data": record(data, config.model.weights),
        "code": files_of(own_code(config)),
        "parameters": count_parameters(trainer.module),
        "seed": config.seed,
        "devices": config.devices,
        "run_hash": run_hash(config),
    }
    if trainer.module.htm is not None:
        facts["htm"] = _htm_numbers(trainer, trainer.module.htm)
    return facts
