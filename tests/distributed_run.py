"""
One rank of a training run on CPUs, for test_distributed.py: the losses of each step, and the weights at the end.

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
    rows = to_sequences(Dataset.from_list(json.loads((folder / "rows.json").read_text())), max_length=64)
    settings = DFlareTrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        max_steps=6, logging_steps=1, per_device_train_batch_size=batch, num_anchors=1000, learning_rate=3e-3,
        gradient_accumulation_steps=2,
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
    """accelerate shards over GPUs only; told that these ranks are some, it shards over CPUs and gloo just as well."""
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "DFlareDecoderLayer", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }  # fmt: skip
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    main()
