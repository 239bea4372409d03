"""
What happens in `generate()` between two target passes: the accepted tokens' taps go into the context cache, a block is
drafted at its trained size, and a prefix of it is handed over for verification. All state lives in the generator of one
call. The acceptance itself is transformers' own loop: greedy match, or speculative sampling (arXiv 2211.17192).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .checks_dflare import CACHE_NAME, VERSION, check_cache, check_inputs, check_positions
from .drafting_dflare import (
    BlockDrafter,
    ContextFeed,
    confidence_threshold,
    draft_count,
    draft_limit,
    fires,
    is_strict,
)
from .policy_dflare import policy_for

# Up to 5.22 a list given as `output_hidden_states` names decoder layers; from 5.23 on, places in the usual tuple.
TUPLE_INDEXED = VERSION >= (5, 23)


@dataclass
class DraftRound:
    """One draft and its verification: tokens drafted, drafts accepted, and whether an end of the text cut it short."""

    drafted: int
    accepted: int
    cut: bool

    @property
    def length(self) -> int:
        """Tokens this round added, the target's bonus token included."""
        return self.accepted + 1


@dataclass
class DraftRecord:
    """
    The rounds of one call of `generate()`, and its plain steps, which verified nothing and gave one token. The prefill is
    neither.
    """

    rounds: list[DraftRound] = field(default_factory=list)
    plain_steps: int = 0

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens per target pass (bonus token counted), of the rounds that neither eos, budget nor criterion cut."""
        return [r.length for r in self.rounds if not r.cut]

    @property
    def acceptance_length(self) -> float:
        """Mean of `acceptance_lengths`; NaN where there is none."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else float("nan")


_records: ContextVar[list[DraftRecord] | None] = ContextVar("dflare_draft_records", default=None)


@contextmanager
def record_drafts() -> Iterator[list[DraftRecord]]:
    """Collects a `DraftRecord` for each call of `generate()` made inside, in this thread or task only."""
    records: list[DraftRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def new_record() -> DraftRecord:
    """A record for a call (of a batch: for each sequence), which a surrounding `record_drafts` collects."""
    record = DraftRecord()
    if (records := _records.get()) is not None:
        records.append(record)
    return record


def request_taps(config) -> list[int]:
    """The value of `output_hidden_states` that makes the installed transformers keep the tapped layers alone."""
    return [i + 1 for i in config.target_layer_ids] if TUPLE_INDEXED else list(config.target_layer_ids)


def select_taps(model_outputs: Any, config: Any) -> list[torch.Tensor]:
    """
    The tapped states, T tensors (b, fed tokens, H), from what a target returned. A tuple as long as the target is deep
    holds layer outputs; one longer is the usual one, with the embedding first. Targets that cannot select return it all.

    Raises:
        RuntimeError: if the tuple is neither, or a tap is not in it.
    """
    states = model_outputs.hidden_states
    shift = len(states) - config.num_target_layers
    taps: list[Any] = [states[i + shift] for i in config.target_layer_ids] if shift in (0, 1) else [None]
    if any(tap is None for tap in taps):
        raise RuntimeError(
            f"the target returned {len(states)} hidden states for {config.num_target_layers} layers, without all of the "
            f"taps {config.target_layer_ids}: transformers {transformers.__version__} selects them differently"
        )
    return taps


class DFlareCandidateGenerator(CandidateGenerator):
    """
    The candidate generator of one call of `generate()` with one sequence.

    Args:
        drafter: a `DFlareForBlockDiffusion`.
        target: the model that verifies.
        generation_config, input_ids, logits_processor, model_kwargs, stopping_criteria: as `generate()` has them.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        *,
        generation_config,
        input_ids: torch.Tensor,
        logits_processor,
        model_kwargs: dict,
        stopping_criteria: Sequence = (),
    ):
        check_cache(model_kwargs.get(CACHE_NAME))
        check_inputs(model_kwargs)
        check_positions(target, input_ids, model_kwargs, generation_config)
        self.drafter, self.block = drafter, BlockDrafter(drafter, target, input_ids)
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        self.processors = logits_processor
        self.limit = draft_limit(drafter.config, generation_config)
        self.criteria = [c for c in stopping_criteria if not _is_the_loops_own(c, generation_config)]
        self.end = _eos_criterion(generation_config) if any(map(is_strict, logits_processor)) else None
        if self.end is not None:
            self.criteria.append(self.end)
        # A user's criterion may read the scores where they are kept, and drafts have none: it is heard at every token.
        keeps_scores = generation_config.output_scores and generation_config.return_dict_in_generate
        if keeps_scores and any(not type(c).__module__.startswith("transformers.") for c in self.criteria):
            self.limit = 0
        self.needs_logits = generation_config.assistant_ensemble_weight is not None
        self.padding = model_kwargs.get("attention_mask")
        wants_all = generation_config.output_hidden_states
        self.model_kwargs_overrides = {"output_hidden_states": True if wants_all else request_taps(drafter.config)}
        _empty_cache(model_kwargs, input_ids.shape[1], generation_config)
        self.context = ContextFeed(drafter)
        self.policy = policy_for(drafter, target, generation_config)
        self.threshold = confidence_threshold(generation_config)
        self.drafted: int | None = None  # in this round; None in a plain step
        self.accepted: int | None = None  # of them; None before the first round has ended
        self.stopped_short = False
        self.record = new_record()

    @torch.no_grad()
    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict,
        model_outputs,
        is_first_iteration: bool,
        n_last_matches: int,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            input_ids: (1, length), all committed tokens; the last is the anchor, whose states the target has not made yet.
            model_outputs: of the target's last pass; None before the prefill.
            n_last_matches: drafts accepted in that pass.
        Returns:
            the committed tokens with the drafted ones appended, (1, length + drafts), and the drafts' processed logits
            (1, drafts, vocabulary), or None where the loop is to compare tokens only.
        """
        if is_first_iteration:
            return input_ids, None
        self._end_round()
        self.policy.begin_round()
        self._keep_states(select_taps(model_outputs, self.drafter.config), n_last_matches)
        limit = min(self.limit, self.max_length - input_ids.shape[1] - 1)
        if limit < 1 or not self.policy.wants_draft():
            return input_ids, None
        logits = self.block.logits(self.block.hidden(input_ids[:, -1:], self.context.commit()), limit)
        count = draft_count(self.policy, logits, self.threshold)
        logits = logits[:, :count].to(input_ids.device)
        tokens, logits = self._choose(input_ids, logits)
        keep = self._before_stop(input_ids, tokens)
        self.drafted, self.stopped_short = keep, keep < count
        if keep == 0:
            return input_ids, None
        wants_logits = (self.do_sample and not self.criteria) or self.needs_logits
        wanted = self.block.whole(logits[:, :keep]) if wants_logits else None
        return torch.cat([input_ids, tokens[:, :keep]], dim=-1), wanted

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Called by the loop after each pass; keeps the record. The prefill is no round."""
        if not self.context.length:
            return
        self.accepted = int(num_matches)
        if self.drafted is None:
            self.record.plain_steps += 1
        else:  # if it is the last, then since something cut it; what follows says otherwise, and no device is asked
            self.record.rounds.append(DraftRound(self.drafted, self.accepted, cut=True))

    def _end_round(self) -> None:
        """Once a round is known not to be the last: what it tells the record, and the policy."""
        if self.accepted is not None:
            if self.drafted is not None:
                self.record.rounds[-1].cut = self.stopped_short
            self.policy.end_round(self.drafted, [self.accepted], self.stopped_short)
        self.drafted, self.stopped_short = None, False

    def _keep_states(self, taps: list[torch.Tensor], n_last_matches: int) -> None:
        """Keeps the states of tokens that the last pass confirmed: of a prefill all but padding, else the accepted."""
        if self.context.length:
            taps = [tap[:, : n_last_matches + 1] for tap in taps]
        elif self.padding is not None:
            real = self.padding[0, : taps[0].shape[1]].bool()
            taps = [tap[:, real.to(tap.device)] for tap in taps]
        self.context.add(taps)

    def _choose(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block.choose(self.processors, self.do_sample, input_ids, logits, self.end)

    def _before_stop(self, input_ids: torch.Tensor, tokens: torch.Tensor) -> int:
        """
        How many drafts lie before the first at which a stopping criterion fires. The loop tests criteria only where a
        round ends, so a longer draft could run past one.
        """
        for count in range(1, tokens.shape[1] + 1) if self.criteria else ():
            prefix = torch.cat([input_ids, tokens[:, :count]], dim=-1)
            if any(fires(criterion, prefix) for criterion in self.criteria):
                return count - 1
        return tokens.shape[1]


def _eos_criterion(generation_config) -> EosTokenCriteria | None:
    eos = getattr(generation_config, "_eos_token_tensor", None)
    return None if eos is None else EosTokenCriteria(eos)


def _is_the_loops_own(criterion, generation_config) -> bool:
    """Whether the loop itself cuts a block where `criterion` fires: at the call's own length and eos tokens only."""
    if isinstance(criterion, MaxLengthCriteria):
        return criterion.max_length >= generation_config.max_length
    own = getattr(generation_config, "_eos_token_tensor", None)
    if not isinstance(criterion, EosTokenCriteria) or own is None:
        return False
    return set(criterion.eos_token_id.tolist()) <= set(own.flatten().tolist())


def _empty_cache(model_kwargs: dict, length: int, generation_config) -> None:
    """
    A cache that holds a prefix of the prompt already is emptied, so that the prefill runs over all of it: the loop would
    go wrong on it, and the drafter needs the prefix's states, which no cache keeps.

    Raises:
        ValueError: if `input_ids` does not repeat the tokens that the cache holds.
    """
    cache: Any = model_kwargs.get(CACHE_NAME)
    filled = 0 if cache is None else cache.get_seq_length()
    if not filled:
        return
    mask = model_kwargs.get("attention_mask")
    whole = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", length)
    if max(whole, filled + 1) > length:
        raise ValueError(
            f"the cache holds {filled} tokens and input_ids only {length} of {max(whole, filled + 1)}; the drafter needs "
            "the states of all of them, so pass the whole prompt as input_ids"
        )
    cache.crop(-filled)
