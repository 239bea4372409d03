"""
One rank of a training run on CPUs, for test_distributed.py: the losses of each step, and the weights at the end. Where it
is one of several, its batches are packed and its activations checkpointed besides, which changes nothing either.

    torchrun --nproc_per_node 2 tests/distributed_run.py FOLDER BATCH_PER_RANK [fsdp]
"""

import json
import os
import sys
from pathlib import Path

import torch


def main() -> None:
    folder, batch, sharded = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["fsdp"]
    torch.set_num_threads(1)
    if sharded:
        pretend_gpus()
    from datasets import Dataset

    from dflare.training.data import to_sequences
    from dflare.training.trainer import DFlareTrainer, DFlareTrainingArguments
    from helpers import tiny_drafter, tiny_target

    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target)
    drafter.set_draft_vocabulary(range(48))
    rows = to_sequences(Dataset.from_list(json.loads((folder / "rows.json").read_text())), max_length=64)
    settings = DFlareTrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        max_steps=6, logging_steps=1, per_device_train_batch_size=batch, num_anchors=1000, learning_rate=3e-3,
        gradient_accumulation_steps=2, packing="WORLD_SIZE" in os.environ,
        gradient_checkpointing="WORLD_SIZE" in os.environ,
    )  # fmt: skip
    trainer = DFlareTrainer(drafter, target, settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        kind = str(trainer.accelerator.distributed_type)
        (folder / "result.json").write_text(json.dumps({"losses": losses, "metrics": metrics, "kind": kind}))


def pretend_gpus() -> None:
    """accelerate shards over GPUs only; told to, it shards over CPUs and gloo just as well, by the config that ships."""
    import yaml

    from dflare.configuration.arguments import RECIPES

    config = yaml.safe_load((RECIPES.parent / "accelerate" / "fsdp.yaml").read_text())["fsdp_config"]
    os.environ |= {
        name.upper(): str(value).lower() if isinstance(value, bool) else str(value) for name, value in config.items()
    }
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    from accelerate.state import AcceleratorState, DistributedType

    plain = AcceleratorState.__init__

    def sharded(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, **kwargs)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin or self.fsdp_plugin

    AcceleratorState.__init__ = sharded


if __name__ == "__main__":
    main()
