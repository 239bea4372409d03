"""`dflare train`: a target's responses to its drafter, as a Hub folder."""

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as compute
import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.utils import logging

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.configuration.arguments import TrainArguments, check_name
from dflare.configuration.targets import load_pretrained, resolve_drafter, resolve_target
from dflare.training import estimate
from dflare.training.data import load_responses, response_files, response_token_ids, to_sequences
from dflare.training.features import FeatureStore, features_made_with
from dflare.training.start import copy_target_layers, drafter_config, trained_drafter
from dflare.training.store import made_with
from dflare.training.trainer import DFlareTrainer, DFlareTrainingArguments

# What a run's checkpoints depend on, besides its data and the drafter's config.
RUN_SETTINGS = (
    "target",
    "start_from",
    "start_layers",
    "max_length",
    "validation_size",
    "validation_data",
    "seed",
)
logger = logging.get_logger(__name__)
NUMBERS = {int, float, bool, type(None)}


def run(args: TrainArguments) -> int:
    """Trains, evaluates, and saves the drafter in bf16 beside what made it."""
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = training_arguments(args)
    if args.dry_run:
        return dry_run(args, settings)
    rows = load_responses(args.data)
    check_maker(args)
    set_seed(args.seed)
    folder = resolve_target(args.target)
    # On the CPU first: which device is this rank's own is for the Trainer to say.
    target = load_pretrained("AutoModelForCausalLM", folder, args.target_dtype, "cpu")
    check_ids(rows, target.config.get_text_config().vocab_size)
    drafter = build_drafter(args, target, AutoTokenizer.from_pretrained(folder))
    if args.draft_vocab_size:
        drafter.set_draft_vocabulary(response_token_ids(rows, args.draft_vocab_size))
    checkpoint = checkpoint_to_resume(args, drafter.config, settings.should_save)
    trainer = build_trainer(args, settings, drafter, target, rows)
    print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters; taps {drafter.config.target_layer_ids}")
    if checkpoint:
        print(f"going on from {checkpoint}; settings of the Trainer that differ from its own count from here on")
    trainer.train(resume_from_checkpoint=checkpoint)
    save(trainer, args)
    return 0


def dry_run(args: TrainArguments, settings: DFlareTrainingArguments) -> int:
    """Says what the run will take; loads no weights."""
    target_config = AutoConfig.from_pretrained(resolve_target(args.target))
    target = estimate.empty(lambda: AutoModelForCausalLM.from_config(target_config))
    mask = {"mask_token_id": 0, **args.drafter}  # which one does not matter to sizes, and needs a tokenizer
    drafter = estimate.empty(lambda: DFlareForBlockDiffusion(drafter_config(mask, target_config, None)))
    typing.cast(DFlareForBlockDiffusion, drafter).config.draft_vocab_size = args.draft_vocab_size
    rows, tokens = data_size(args)
    batch, budget = settings.per_device_train_batch_size, settings.anchor_budget
    run = estimate.Run(
        rows, tokens, settings.num_train_epochs, batch, settings.gradient_accumulation_steps, args.num_devices,
        min(settings.num_anchors, (budget or math.inf) / batch), args.device_tflops, args.utilisation,
        settings.max_steps, settings.gradient_checkpointing, bool(args.features),
    )  # fmt: skip
    hours = estimate.device_hours(drafter, target, target_config, run)
    memory = estimate.gigabytes(drafter, target, run)
    print(f"drafter: {estimate.parameters(drafter):,} parameters; target: {estimate.parameters(target):,}")
    print(
        f"steps: {run.steps:,} of {run.sequences // run.steps} sequences, {rows:,} rows of {tokens:,} tokens an epoch"
    )
    parts = ", ".join(f"{name} {size:.1f}" for name, size in memory.items())
    print(f"memory of a device, about: {sum(memory.values()):.0f} GB ({parts})")
    each = hours / args.num_devices
    print(
        f"about {hours:,.{int(hours < 10)}f} device-hours, {each:,.{int(each < 10)}f} on each of {args.num_devices} "
        f"({args.utilisation:.0%} of {args.device_tflops:g} TFLOPS)"
    )
    return 0


def data_size(args: TrainArguments) -> tuple[int, int]:
    """Rows, and tokens in each on average: as told and half of `max_length`, else those of the data."""
    if args.num_rows is not None:
        return args.num_rows, args.max_length // 2
    sequences = to_sequences(load_responses(args.data), args.max_length)
    held_back = 0 if args.validation_data else args.validation_size
    return max(1, len(sequences) - held_back), max(1, round(sum(sequences["length"]) / len(sequences)))


def build_trainer(args: TrainArguments, settings, drafter, target, rows) -> DFlareTrainer:
    """The trainer with its data."""
    parts = split_rows(args, rows)
    if settings.should_save:
        _replace(Path(args.output_dir) / "validation.parquet", parts[1].to_parquet)
    train, validation = (to_sequences(part, args.max_length) for part in parts)
    check_rows(args.max_length, settings, train, validation)
    features = None
    if args.features:
        features = FeatureStore(args.features, features_made_with(target, drafter.config))
        features.check([*train, *validation])
    return DFlareTrainer(drafter, target, settings, features, train_dataset=train, eval_dataset=validation)


def check_maker(args: TrainArguments) -> None:
    """Warns of responses that, by what their files say, another target made; a folder may be the same by another name."""
    for file in response_files(args.data):
        maker = made_with(file).get("target", args.target)
        if Path(maker).name.lower() != Path(args.target).name.lower():
            logger.warning(f"target is {args.target!r}, but {file} says that its responses are those of {maker!r}")


def check_ids(rows: Dataset, vocab_size: int) -> None:
    """Raises `ValueError` for token ids that the target does not have."""
    for name in ("prompt_ids", "response_ids"):
        largest = compute.max(compute.list_flatten(rows.data.column(name))).as_py() or 0
        if largest >= vocab_size:
            raise ValueError(
                f"data: {name} holds the id {largest}, but the target's vocabulary has {vocab_size} tokens"
            )


def check_rows(max_length: int, settings: DFlareTrainingArguments, train: Dataset, validation: Dataset) -> None:
    """Raises `ValueError` where rows cannot be trained on, or not be judged by as is wanted."""
    if not len(train) or not len(validation):
        raise ValueError(
            f"max_length is {max_length}, which leaves no response token of any training or validation row"
        )
    wanted = settings.metric_for_best_model or ""
    if wanted.endswith("acceptance_length") and not any(validation["greedy"]):
        raise ValueError(
            f"trainer.metric_for_best_model is {wanted!r}, but none of the {len(validation)} validation rows is greedy, "
            "and an acceptance length is that of greedy ones"
        )


def build_drafter(args: TrainArguments, target, tokenizer) -> DFlareForBlockDiffusion:
    """The drafter to train for `target`, in fp32: a fresh one, or with `start_from` a trained one."""
    if (args.draft_vocab_size or 0) > (size := target.config.get_text_config().vocab_size):
        raise ValueError(f"draft_vocab_size is {args.draft_vocab_size}, but the target's vocabulary has {size}")
    if args.start_from and args.start_layers:
        raise ValueError(
            f"start_layers is {args.start_layers!r}, but start_from is {args.start_from!r}; one start is enough"
        )
    if args.start_from:
        drafter = trained_drafter(resolve_drafter(args.start_from), args.drafter, target)
    else:
        drafter = fresh_drafter(args, target, tokenizer)
    drafter.set_attn_implementation(args.attention)
    return drafter


def fresh_drafter(args: TrainArguments, target, tokenizer) -> DFlareForBlockDiffusion:
    """A drafter that knows nothing yet, but for `start_layers`."""
    drafter = DFlareForBlockDiffusion(drafter_config(args.drafter, target.config, tokenizer))
    torch.nn.init.constant_(drafter.norm.weight, args.final_norm_start)
    if args.start_layers:
        copied = copy_target_layers(drafter, target, args.start_layers)
        print(f"started from the target's layers {copied}")
    return drafter


def split_rows(args: TrainArguments, rows: Dataset) -> tuple[Dataset, Dataset]:
    """Rows to train on and rows to validate on: drawn by the seed, or given."""
    if args.validation_data:
        validation = load_responses(args.validation_data)
        held_back = set(validation["id"])
        train = rows.select([place for place, id in enumerate(rows["id"]) if id not in held_back])
    elif 0 < args.validation_size < len(rows):
        train, validation = rows.train_test_split(test_size=args.validation_size, seed=args.seed).values()
    else:
        raise ValueError(
            f"validation_size is {args.validation_size}, but data holds {len(rows)} rows, and some must be left to train on"
        )
    if not len(train):
        raise ValueError(f"validation_data is {args.validation_data}, which holds every row of {args.data}")
    return train, validation


def checkpoint_to_resume(args: TrainArguments, config: DFlareConfig, writes: bool = True) -> str | None:
    """
    The newest whole checkpoint in `output_dir`, or None. What the run is made of is written there at its start, by the rank
    that `writes`.

    Raises:
        ValueError: if the checkpoints belong to a run with another drafter, target or data, naming field and values.
    """
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    made_of = {key: getattr(args, key) for key in RUN_SETTINGS}
    made_of["data"] = [_digest(file) for file in response_files(args.data)]
    made_of |= {f"drafter.{k}": v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype")}
    made_of = json.loads(json.dumps(made_of))
    record = output / "run.json"
    checkpoints = [folder for folder in _newest_first(output) if _is_whole(folder)]
    if checkpoints:
        before = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        for key, value in made_of.items():
            if before.get(key) != value:
                raise ValueError(
                    f"{key} is {value!r}, but the checkpoints in {output} were made with {before.get(key)!r}; choose "
                    "another output_dir"
                )
    if writes:
        _write_json(record, made_of)
    return str(checkpoints[0]) if checkpoints else None


def save(trainer: DFlareTrainer, args: TrainArguments) -> None:
    """Writes `drafter/` (weights in bf16, config, code), then evaluates and writes `training.json`."""
    output = Path(args.output_dir)
    weights = trainer.accelerator.get_state_dict(trainer.model)  # from all ranks, whole on the first
    if trainer.is_world_process_zero():
        config = trainer.accelerator.unwrap_model(trainer.model).config
        release = DFlareForBlockDiffusion(config).to(torch.bfloat16)
        release.load_state_dict(weights)
        release.save_pretrained(output / "drafter")
    metrics = trainer.evaluate()
    if not trainer.is_world_process_zero():
        return
    report = {"arguments": dataclasses.asdict(args), "evaluation": metrics, "log": trainer.state.log_history}
    _write_json(output / "training.json", report)
    length = metrics.get("eval_acceptance_length", math.nan)  # missing where dataloader_drop_last left no row
    print(f"acceptance length {length:.3f} on held-back prompts; drafter in {output / 'drafter'}")
    if math.isnan(length):
        print("no held-back response is greedy, so there is no acceptance length; regenerate some with temperature 0")


def training_arguments(args: TrainArguments) -> DFlareTrainingArguments:
    """The Trainer's arguments; `ValueError` for a key that it does not have or a value that it refuses."""
    known = {item.name for item in dataclasses.fields(DFlareTrainingArguments) if item.init} - {"output_dir"}
    kinds = typing.get_type_hints(DFlareTrainingArguments)
    for key, value in args.trainer.items():
        check_name("trainer", key, known)
        if isinstance(value, str) and set(typing.get_args(kinds[key]) or (kinds[key],)) <= NUMBERS:
            raise ValueError(f"trainer.{key} is {value!r}, but a number, true or false is expected")
    given = {"seed": args.seed, **args.trainer}
    if args.dry_run:
        given["use_cpu"] = True  # for a recipe for GPUs is to be read on any machine
    try:
        settings = DFlareTrainingArguments(output_dir=args.output_dir, **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"trainer: {' '.join(str(error).split())}") from None
    if not args.dry_run:
        check_machine(args.attention, settings)
    return settings


def check_machine(attention: str, settings: DFlareTrainingArguments) -> None:
    """Raises `ValueError` for what the run asks of this machine and it does not have."""
    if attention == "flex_attention" and settings.device.type == "cpu":
        raise ValueError(
            "attention is flex_attention, whose backward pass torch has on GPUs alone; this run is on a CPU"
        )
    installed = get_available_reporting_integrations()
    for name in settings.report_to:
        if name in INTEGRATION_TO_CALLBACK and name not in installed:
            raise ValueError(f"trainer.report_to is {name!r}, which is not installed; found {installed or 'none'}")


def _newest_first(output: Path) -> list[Path]:
    return sorted(output.glob("checkpoint-*"), key=lambda folder: -int(folder.name.rpartition("-")[2]))


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint's writing came to its end: its last file is readable, and so are the weights."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        with safe_open(checkpoint / "model.safetensors", "pt"):
            return True
    except (OSError, ValueError, SafetensorError):
        print(f"{checkpoint} is not whole, so an older one is taken")
        return False


def _write_json(path: Path, content: dict) -> None:
    """Writes strict JSON (NaN becomes null) in one go."""
    strict = json.loads(json.dumps(content), parse_constant=lambda name: None)
    _replace(path, lambda file: file.write_text(json.dumps(strict, indent=1) + "\n", encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make the file in one go."""
    temporary = path.with_suffix(".tmp")
    write(temporary)
    temporary.replace(path)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
