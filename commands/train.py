"""`dflare train`: a target's responses to its drafter, as a Hub folder."""

import dataclasses
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.configuration.arguments import TrainArguments
from dflare.configuration.targets import resolve_target
from dflare.training.data import load_responses, response_token_ids, to_sequences
from dflare.training.trainer import DFlareTrainer, DFlareTrainingArguments


def run(args: TrainArguments) -> int:
    """Trains, evaluates, and saves the drafter in bf16 beside what made it."""
    if args.threads:
        torch.set_num_threads(args.threads)
    set_seed(args.seed)
    training_args = training_arguments(args)
    rows = load_responses(args.data)
    folder = resolve_target(args.target)
    dtype = args.target_dtype if args.target_dtype == "auto" else getattr(torch, args.target_dtype)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    drafter = build_drafter(args, target, AutoTokenizer.from_pretrained(folder))
    split = rows.train_test_split(test_size=args.validation_size, seed=args.seed)
    trainer = DFlareTrainer(
        drafter,
        target,
        training_args,
        token_ids=response_token_ids(rows) if args.restrict_vocabulary else None,
        train_dataset=to_sequences(split["train"], args.max_length),
        eval_dataset=to_sequences(split["test"], args.max_length),
    )
    print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters; taps {drafter.config.target_layer_ids}")
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir) if args.resume else None)
    save(trainer, args, trainer.evaluate())
    return 0


def build_drafter(args: TrainArguments, target, tokenizer) -> DFlareForBlockDiffusion:
    """A fresh drafter for `target`, in fp32."""
    config = DFlareConfig.from_target(target.config, tokenizer=tokenizer, **args.drafter)
    drafter = DFlareForBlockDiffusion(config)
    torch.nn.init.constant_(drafter.norm.weight, args.final_norm_start)
    return drafter


def save(trainer: DFlareTrainer, args: TrainArguments, metrics: dict) -> None:
    """Writes `drafter/` (weights in bf16, config, code) and `training.json` (recipe, log and last evaluation)."""
    output = Path(args.output_dir)
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    drafter.to(torch.bfloat16).save_pretrained(output / "drafter")
    report = {"arguments": dataclasses.asdict(args), "evaluation": metrics, "log": trainer.state.log_history}
    (output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"acceptance length {metrics['eval_acceptance_length']:.3f} on held-back prompts; drafter in {output / 'drafter'}"
    )


def training_arguments(args: TrainArguments) -> DFlareTrainingArguments:
    known = {item.name for item in dataclasses.fields(DFlareTrainingArguments) if item.init}
    unknown = set(args.trainer) - known
    if unknown:
        raise ValueError(f"trainer: unknown keys {sorted(unknown)}; they are DFlareTrainingArguments' fields")
    return DFlareTrainingArguments(output_dir=args.output_dir, **{"seed": args.seed, **args.trainer})
