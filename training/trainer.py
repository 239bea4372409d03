"""`DFlareTrainer`: a `transformers.Trainer` whose loss is the block loss on the online states of a frozen target."""

import contextlib
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalPrediction
from transformers.utils import logging

from dflare.checks_dflare import check_layers, check_sizes
from dflare.drafting_dflare import drafting_head

from .anchors import IGNORED, draw_anchors, slot_labels, token_positions
from .data import pack_sequences, pad_sequences, pad_with_every_anchor
from .features import decoder_of, known_states, remember_states, target_states
from .loss import Objective, block_hidden_states, block_loss, draftable, loss_divisor, slot_losses
from .muon import MuonAndAdamW
from .weights import gamma_at

logger = logging.get_logger(__name__)
EVALUATION_ANCHORS = 64  # blocks evaluated at once, which bounds the attention mask
PACKING_TOLERANCE = 0.02  # what rounding may change in bf16


@dataclass
class DFlareTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what the block loss needs; the fields named here default to the paper's settings."""

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up, as a share of all steps if below 1."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data."})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "Sequences per device and step."})
    gamma: float | None = field(
        default=4.5, metadata={"help": "Decay of the position weights, in slots; null for none."}
    )
    gamma_step: float = field(default=1.0, metadata={"help": "What gamma gains with each epoch; 0 keeps it fixed."})
    gamma_end: float | None = field(
        default=None, metadata={"help": "Let gamma grow evenly to this value over all steps, instead of by epochs."}
    )
    weighting: str = field(
        default="decay",
        metadata={"help": "Weights of a block's slots: decay (by gamma), expected_length (D-PACE) or until_failure."},
    )
    weighting_alpha: float = field(default=0.5, metadata={"help": "Smoothing of expected_length."})
    distillation: str | None = field(
        default=None, metadata={"help": "Learn the target's distribution too, by kl or total_variation."}
    )
    distillation_share: float = field(default=0.5, metadata={"help": "Share of the distillation in the loss."})
    num_anchors: int = field(default=512, metadata={"help": "Anchors per sequence at most."})
    anchor_budget: int | None = field(
        default=None,
        metadata={"help": "Anchors per device and batch at most, whatever the accumulation."},
    )
    fusion_lr_scale: float = field(
        default=1.0, metadata={"help": "Learning rate of the fusion weights, as a multiple."}
    )
    muon: bool = field(
        default=False, metadata={"help": "Muon instead of AdamW for weight matrices (one process or DDP)."}
    )
    packing: bool = field(
        default=False, metadata={"help": "Lay a batch's sequences one after the other instead of padding each."}
    )
    keep_states: bool = field(
        default=False,
        metadata={
            "help": "Keep the target's tapped states of every sequence in memory after its first pass: "
            "(taps + 1) x hidden size numbers a token, and later epochs do without the target."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"gamma is {self.gamma}; it must be positive, or null for unweighted slots")
        if self.gamma_end is not None and (self.gamma is None or self.gamma_end <= 0):
            raise ValueError(f"gamma_end is {self.gamma_end} and gamma {self.gamma}; both must be positive")
        self.objective  # noqa: B018  which checks its own fields
        for name in ("num_anchors", "anchor_budget", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value}; a whole number from 1 on is expected")

    @property
    def objective(self) -> Objective:
        """What the loss is made of."""
        return Objective(self.weighting, self.weighting_alpha, self.distillation, self.distillation_share)


class ByEpoch(torch.utils.data.Sampler):
    """A sampler's order by seed and epoch alone, so that a run that goes on sees what it would have seen."""

    def __init__(self, sampler: LengthGroupedSampler, seed: int):
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self):
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of each epoch."""
        self.epoch = epoch


class DFlareTrainer(Trainer):
    """
    Trains a drafter against its frozen target, which runs online for its hidden states.

    Args:
        model: the `DFlareForBlockDiffusion` to train, in fp32 (`bf16=True` computes in bf16 on fp32 master weights). One
            with a draft vocabulary learns from labels in it alone; in evaluation all others count as wrong.
        target: the frozen target, in any dtype.
        args: `DFlareTrainingArguments`.
        features: the target's states on every sequence (`FeatureStore`), instead of passes of the target.
        compute_metrics: adds to our own metrics; its predictions are rows of `sequence_statistics`.

    Evaluation reports the loss, the accuracy at each slot, and the acceptance length that greedy verification would have
    had on the greedy rows: the blocks are walked through as `generate()` would walk them.
    """

    model: Any

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        args: DFlareTrainingArguments,
        features: Mapping[bytes, torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        **kwargs,
    ):
        check_arguments(args)
        if args.keep_states and features is not None:
            raise ValueError(
                "keep_states is True, but features are given, which hold the states already; one is enough"
            )
        check_layers(getattr(target, "get_base_model", lambda: target)())  # beneath an adapter of peft
        self.target = target.eval().requires_grad_(False)
        if args.distillation:
            check_logits(target, args.distillation)
        self.features = features
        self.embed = target.get_input_embeddings()
        head = target.get_output_embeddings()
        if getattr(target, "hf_device_map", None) is None:
            for part in (self.embed, head) if features is not None else (target,):
                part.to(args.device)
        self.head, _ = drafting_head(model, head)
        kwargs.setdefault("data_collator", pack_sequences if args.packing else pad_sequences)
        args.remove_unused_columns = False
        self.further_metrics = compute_metrics
        super().__init__(model=model, args=args, compute_metrics=self.metrics_of, **kwargs)
        check_sizes(self.accelerator.unwrap_model(self.model), target)
        self.model_accepts_loss_kwargs = True
        self.label_names = ["loss_mask"]
        self.warned_of_empty_rows = False
        self.kept_states: dict[bytes, torch.Tensor] = {}
        self.can_return_loss = True
        if args.packing and features is None:
            check_packing(self.target_states, target.config.get_text_config().vocab_size, args.device)

    def metrics_of(self, prediction: EvalPrediction) -> dict[str, float]:
        """Our metrics, and those of the user's `compute_metrics`."""
        own = reduce_statistics(prediction)
        return {**own, **self.further_metrics(prediction)} if self.further_metrics else own

    @property
    def gamma(self) -> float | None:
        """The position weights' decay at this moment of the schedule."""
        args, state = self.args, self.state
        progress = state.global_step / max(state.max_steps, 1)
        return gamma_at(args.gamma, args.gamma_step, args.gamma_end, epoch=state.epoch or 0.0, progress=progress)

    def target_states(self, input_ids: torch.LongTensor, **inputs) -> list[torch.Tensor]:
        """`features.target_states` of our target."""
        return target_states(self.target, self.accelerator.unwrap_model(self.model).config, input_ids, **inputs)

    def states(self, inputs: dict) -> list[torch.Tensor]:
        """The target's states of a batch, as `target_states`: from features, from memory, or computed."""
        if self.features is not None:
            return known_states(self.features, inputs)
        if self.args.keep_states and self.model.training:
            remember_states(self.kept_states, inputs, self.target_states)
            return known_states(self.kept_states, inputs)
        packed = {"position_ids": token_positions(inputs["starts"])} if self.args.packing else {}
        return self.target_states(inputs["input_ids"], **packed)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        *taps, last = self.states(inputs)
        loss = block_loss(
            model,
            self.embed,
            self.head,
            inputs["input_ids"],
            inputs["loss_mask"],
            taps,
            inputs["anchors"],
            inputs["keep"],
            self.gamma,
            divisor=num_items_in_batch,
            objective=self.args.objective,
            target_states=last,
            starts=inputs["starts"],
        )
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.state.global_step}; stopping")
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, None) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """
        The loss's divisor (`loss_divisor`), summed over all micro-batches of a step and all ranks. Their anchors are drawn
        here: by seed, step and rank alone, so that a run that goes on draws what it would have drawn.
        """
        seed = f"{self.args.seed} {self.state.global_step} {self.args.process_index}"
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        for batch in batch_samples:
            batch["anchors"], batch["keep"] = draw_anchors(
                batch["loss_mask"], self.args.num_anchors, generator, self.args.anchor_budget, batch["starts"]
            )
        block_size = self.accelerator.unwrap_model(self.model).config.block_size
        empty = sum(int((~batch["keep"].any(dim=1)).sum()) for batch in batch_samples)
        if empty and not self.warned_of_empty_rows:
            self.warned_of_empty_rows = True
            logger.warning(f"{empty} sequences of this step hold no anchor and add nothing to the loss (said once)")
        total = torch.zeros((), device=device)
        for batch in batch_samples:
            ids, mask, anchors = batch["input_ids"], batch["loss_mask"], batch["anchors"]
            labels = slot_labels(ids, mask, anchors, batch["keep"], block_size, batch["starts"])
            labels = draftable(labels.to(device), self.head)
            total += loss_divisor(labels, self.gamma, self.args.objective).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return total

    def create_optimizer(self, *args, **kwargs):
        """Muon, or the Trainer's optimiser; the fusion weights in a group of their own if they learn at another rate."""
        if self.args.muon:
            self.optimizer = self._muon()
            return self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        fusion = getattr(self.accelerator.unwrap_model(self.model), "layer_fusion_weights", None)
        if self.args.fusion_lr_scale != 1.0 and fusion is not None:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not fusion]
            rate = self.args.learning_rate * self.args.fusion_lr_scale
            optimizer.add_param_group({"params": [fusion], "lr": rate, "weight_decay": 0.0})
        return optimizer

    def _muon(self) -> MuonAndAdamW:
        args = self.args
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"muon is True, but torch {torch.__version__} has no Muon, which came with 2.9")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "muon is True, but parameters are sharded, and Muon needs whole matrices; set muon to False"
            )
        learning = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        scales = {name: args.fusion_lr_scale for name in learning if name.endswith("layer_fusion_weights")}
        betas = (args.adam_beta1, args.adam_beta2)
        return MuonAndAdamW(learning, args.learning_rate, scales, args.weight_decay, betas=betas, eps=args.adam_epsilon)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """The Trainer's log, with gamma beside the loss."""
        gamma = {"gamma": self.gamma} if "loss" in logs and self.gamma is not None else {}
        super().log({**logs, **gamma}, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """The Trainer's, with a model of the drafter's own class, by which the folder can be loaded."""
        trained, self.model = self.model, _of_own_class(self.model)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = trained

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """The Trainer's push during training, with the drafter's code, without which the repository cannot be loaded."""
        for file in Path(checkpoint_folder).glob("*.py"):
            shutil.copy(file, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _get_train_sampler(self, *args, **kwargs):
        """The Trainer's sampler; one that groups by length gets an order that seed and epoch decide, not the past."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        return ByEpoch(sampler, self.args.seed) if isinstance(sampler, LengthGroupedSampler) else sampler

    def get_eval_dataloader(self, eval_dataset=None):
        """As the Trainer's, with every response position an anchor."""
        with self._every_anchor():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        """As `get_eval_dataloader`."""
        with self._every_anchor():
            return super().get_test_dataloader(test_dataset)

    @contextlib.contextmanager
    def _every_anchor(self):
        collator, self.data_collator = self.data_collator, pad_with_every_anchor
        try:
            yield
        finally:
            self.data_collator = collator

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The batch's unweighted loss, and a row of statistics per sequence for `reduce_statistics`, which counts."""
        inputs = self._prepare_inputs(inputs)
        config, ids = self.accelerator.unwrap_model(model).config, inputs["input_ids"]
        labels = slot_labels(ids, inputs["loss_mask"], inputs["anchors"], inputs["keep"], config.block_size)
        sayable, valid = draftable(labels, self.head), labels != IGNORED
        *taps, _ = self.states(inputs)
        lost, correct = torch.zeros(labels.shape, device=labels.device), torch.zeros_like(labels, dtype=torch.bool)
        for piece in torch.arange(labels.shape[1], device=labels.device).split(EVALUATION_ANCHORS):
            anchors, keep, wanted = inputs["anchors"][:, piece], inputs["keep"][:, piece], sayable[:, piece]
            hidden = block_hidden_states(model, self.embed, ids, taps, anchors, keep)[:, :, 1:]
            known = wanted != IGNORED
            losses, hits = slot_losses(hidden[known], wanted[known], self.head)
            lost[:, piece] = torch.zeros_like(lost[:, piece]).masked_scatter(known, losses)
            correct[:, piece] = torch.zeros_like(known).masked_scatter(known, hits)
        known = sayable != IGNORED
        rows = zip(lost, known, correct, valid, inputs["keep"], inputs["greedy"], strict=True)
        statistics = torch.stack([sequence_statistics(*row) for row in rows])
        return lost.sum() / known.sum().clamp(min=1), statistics, inputs["greedy"]


def _of_own_class(model: Any) -> Any:
    """The model; for one that FSDP has made of a class of its own, one of the class before, without weights."""
    kinds: list[Any] = [kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)]
    if kinds[0] is type(model) or not issubclass(kinds[0], PreTrainedModel):
        return model
    with torch.device("meta"):
        return kinds[0](model.config)


def check_arguments(args: DFlareTrainingArguments) -> None:
    """Raises `ValueError` for arguments of the Trainer that cannot hold for a drafter."""
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha is {args.neftune_noise_alpha}, but a drafter has no embedding of its own"
        )
    for name in ("include_for_metrics", "batch_eval_metrics"):
        if value := getattr(args, name):
            raise ValueError(f"{name} is {value}; metrics are given counts of each sequence, after all batches")
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}, but the block loss knows no smoothing"
        )
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "gradient_checkpointing_kwargs has use_reentrant True, which loses the gradient of the context; set it to False"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs; start one for each with accelerate launch, or show it one"
        )


@torch.no_grad()
def check_logits(target: PreTrainedModel, distillation: str) -> None:
    """Raises `ValueError` where the target does more to its head's output than the distillation would: scales, caps."""
    ids = torch.arange(8)[None].to(target.device)
    states, head = decoder_of(target)(input_ids=ids, use_cache=False).last_hidden_state, target.get_output_embeddings()
    logits, plain = target(input_ids=ids, use_cache=False).logits.float(), head(states).float()
    if not torch.allclose(logits, plain, rtol=0.05, atol=0.05 * float(logits.std())):
        raise ValueError(
            f"distillation is {distillation!r}, but {type(target).__name__} scales or caps what its head says, so the "
            "drafter would learn another distribution; set distillation to null"
        )


def check_packing(states_of: Callable[..., list[torch.Tensor]], vocab_size: int, device: torch.device) -> None:
    """Raises `ValueError` for a target whose tokens see other sequences of a packed row, or have other positions in it."""
    first, second = (
        torch.randint(vocab_size, (16,), generator=torch.Generator().manual_seed(0)).to(device).split((9, 7))
    )
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None].to(device)
    packed = torch.cat(states_of(torch.cat([first, second])[None], position_ids=positions))[:, 9:].float()
    alone = torch.cat(states_of(second[None])).float()
    difference = float((packed - alone).norm() / alone.norm())
    if difference > PACKING_TOLERANCE:
        raise ValueError(
            f"packing is True, but in a packed row the target's states differ by {difference:.1%} from those of the same "
            "sequence alone: it does not keep packed sequences apart; set packing to False"
        )


def sequence_statistics(
    losses: torch.Tensor,
    known: torch.Tensor,
    correct: torch.Tensor,
    valid: torch.Tensor,
    keep: torch.Tensor,
    greedy: torch.Tensor,
) -> torch.Tensor:
    """
    One sequence's counts, (4 + 2 (B - 1),): rounds and tokens of a greedy walk through its blocks, the sum of the slots'
    losses and how many have one, then correct and valid slots at each position. Rounds that the sequence's end cuts are
    left out, as in every acceptance length we report.

    Args:
        losses, known, correct, valid: (A, B - 1) for all anchors of a sequence, one after the other; `known` slots have a
            loss, `valid` ones a label. keep: (A,). greedy: ().
    """
    count = int(keep.sum())
    lead = (correct & valid).int().cumprod(dim=-1).sum(dim=-1).tolist()
    rounds = tokens = anchor = 0
    while greedy and anchor + lead[anchor] + 1 < count:
        rounds, tokens = rounds + 1, tokens + lead[anchor] + 1
        anchor += lead[anchor] + 1
    sums = torch.cat([correct.sum(dim=0), valid.sum(dim=0)])
    walk = torch.tensor([rounds, tokens], device=sums.device)
    return torch.cat([walk, losses.sum()[None], known.sum()[None], sums]).float()


def reduce_statistics(prediction: EvalPrediction) -> dict[str, float]:
    """
    Metrics of `sequence_statistics` rows (N, 4 + 2 (B - 1)): `loss` (of all slots alike), `acceptance_length`, and
    `accuracy_k` for each slot k.
    """
    rows = prediction.predictions
    totals = np.concatenate(rows).sum(axis=0) if isinstance(rows, list) else rows.sum(axis=0)
    rounds, tokens, lost, known = totals[:4]
    correct, valid = np.split(totals[4:], 2)
    accuracies = {f"accuracy_{k}": float(c / max(v, 1)) for k, (c, v) in enumerate(zip(correct, valid, strict=True), 1)}
    length = float(tokens / rounds) if rounds else float("nan")
    return {"loss": float(lost / max(known, 1)), "acceptance_length": length, **accuracies}
