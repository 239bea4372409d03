"""
Several sequences in one call, which transformers' own assisted loop refuses (and single ones of a target whose weights are
all offloaded, on which it breaks down). All rows draft and verify together; where a row accepts fewer drafts than another,
its rejected ones stay behind as columns that the attention mask hides, in the target's cache and in the drafter's context
alike. Such columns are cleared away when they become many, and finished rows leave the batch. Targets and calls that cannot
be served so are decoded row by row, each by transformers' loop.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .candidates_dflare import DraftRound, new_record, request_taps, select_taps
from .checks_dflare import CACHE_NAME, check_cache, check_positions
from .drafting_dflare import (
    BlockDrafter,
    ContextFeed,
    are_blind,
    confidence_threshold,
    draft_count,
    draft_limit,
    fires,
    is_strict,
)
from .policy_dflare import policy_for

# Inputs of the target that this loop makes itself, so that it may drop those of the call.
SERVED_INPUTS = {"attention_mask", "position_ids", CACHE_NAME, "use_cache", "logits_to_keep"}
PER_ROW = {"prompt_ignore_length", "encoder_input_ids"}  # what logits processors keep of each sequence
SPARE_COLUMNS = 32  # hidden columns that are always put up with


def decode_batch(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    stock: Callable,
    input_ids: torch.Tensor,
    *,
    generation_config,
    logits_processor,
    stopping_criteria,
    streamer=None,
    synced_gpus: bool = False,
    model_kwargs: dict,
    **call,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    Decodes more than one sequence, (b, length) and left-padded, as `generate()` has prepared it.

    Args:
        stock: transformers' assisted loop, for rows that have to be decoded one by one.
        call: what else that loop takes.
    Returns:
        (b, length + longest answer), padded on the right; inside a dictionary with `return_dict_in_generate`.
    Raises:
        ValueError: for what is not served in batches, before anything is computed.
    """
    _check_call(generation_config, logits_processor, streamer, model_kwargs)
    check_positions(target, input_ids, model_kwargs, generation_config)
    served = {"generation_config": generation_config, "stopping_criteria": stopping_criteria}
    processors = [_row_processors(logits_processor, row, len(input_ids)) for row in range(len(input_ids))]
    together = _served_together(drafter, target, input_ids, generation_config, model_kwargs)
    if together and not any(map(is_strict, logits_processor)) and not synced_gpus:
        rows = BatchDecoder(drafter, target, input_ids, processors, model_kwargs=model_kwargs, **served).run()
    elif target.device.type == "meta":
        raise ValueError(
            f"{type(target).__name__}: all its weights are offloaded (device meta), which transformers' assisted loop "
            "cannot serve, and ours not with this cache or these inputs; keep its embedding in memory"
        )
    else:
        served |= {"synced_gpus": synced_gpus, "assistant_model": drafter, **call}
        rows = [
            stock(target, input_ids[row : row + 1], logits_processor=processors[row], **served, **kwargs)
            for row, kwargs in enumerate(_rows_of(target, input_ids, generation_config, model_kwargs))
        ]
    sequences = _padded(rows, generation_config)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


class BatchDecoder:
    """
    The loop of one call. Tensors hold the active rows alone, `texts` and `records` all.

    Args:
        input_ids: (b, length). processors: a list of logits processors for each row.
        generation_config, stopping_criteria, model_kwargs: as `generate()` prepared them.
    """

    def __init__(
        self, drafter, target, input_ids, processors, *, generation_config, stopping_criteria, model_kwargs: dict
    ):
        self.drafter, self.target, self.do_sample = drafter, target, generation_config.do_sample
        self.block = BlockDrafter(drafter, target, input_ids)
        self.processors = processors
        self.stops = {
            token for c in stopping_criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id.tolist()
        }
        self.criteria = [c for c in stopping_criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
        self.plain = not any(processors) and not self.do_sample
        self.limit = draft_limit(drafter.config, generation_config)
        self.threshold = confidence_threshold(generation_config)
        self.max_length = min(c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria))
        self.policy = policy_for(drafter, target, generation_config, len(input_ids))
        self.cache, self.context = model_kwargs[CACHE_NAME], ContextFeed(drafter)
        self.prefill_kwargs = {key: model_kwargs[key] for key in ("logits_to_keep",) if key in model_kwargs}
        self.texts = list(input_ids.split(1))
        self.records = [new_record() for _ in self.texts]
        self.rows = list(range(len(self.texts)))  # the text of each active row
        mask = model_kwargs.get("attention_mask")
        self.valid = torch.ones_like(input_ids).bool() if mask is None else mask.bool()  # (b, columns of the caches)
        self.filled = self.valid.sum(dim=1).tolist()  # valid columns of each active row

    @torch.no_grad()
    def run(self) -> list[torch.Tensor]:
        """Every row to its end; (1, its length) each."""
        self._prefill()
        while self.rows:
            self._clear_columns()
            self._round()
        return self.texts

    def _prefill(self) -> None:
        ids = torch.cat(self.texts)
        positions = (self.valid.cumsum(dim=1) - 1).clamp(min=0)
        outputs = self._forward(ids, self.valid, positions, **self.prefill_kwargs)
        self.context.add_prompts(self._taps(outputs), positions, self.valid)
        chosen, _ = self._accept(ids[:, :0], None, outputs.logits[:, -1:])
        self._drop(self._add_tokens(chosen))

    def _round(self) -> None:
        self.policy.begin_round()
        anchors = torch.cat([self.texts[row][:, -1:] for row in self.rows])
        room = self.max_length - 1 - min(self.texts[row].shape[1] for row in self.rows)
        limit = min(self.limit, room)
        drafts, draft_logits = anchors[:, :0], None
        if drafting := limit > 0 and self.policy.wants_draft():
            drafts, draft_logits = self._draft(anchors, limit)
        fed = torch.cat([anchors, drafts], dim=1)
        positions = self._positions(fed.shape[1])
        outputs = self._forward(fed, torch.cat([self.valid, torch.ones_like(fed).bool()], dim=1), positions)
        chosen, accepted = self._accept(drafts, draft_logits, outputs.logits)
        self._keep_columns(outputs, positions, accepted, drafts.shape[1])
        before = [self.texts[row].shape[1] for row in self.rows]
        ended = self._add_tokens(chosen)
        going_on = [None if end else count for count, end in zip(accepted, ended, strict=True)]
        for row, length, end in zip(self.rows, before, ended, strict=True):
            if drafting:
                added = self.texts[row].shape[1] - length
                self.records[row].rounds.append(DraftRound(drafts.shape[1], added - 1, end))
            else:
                self.records[row].plain_steps += 1
        self.policy.end_round(drafts.shape[1] if drafting else None, going_on)
        self._drop(ended)

    def _positions(self, width: int) -> torch.Tensor:
        """Positions (b, width) of tokens that follow each row's valid columns."""
        start = torch.tensor(self.filled, device=self.valid.device).unsqueeze(1)
        # Ordinary decoding feeds no token at the last position; rows that are ahead may draft beyond it, for nothing.
        return (start + torch.arange(width, device=self.valid.device)).clamp(max=self.max_length - 2)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, **kwargs):
        return self.target(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=True,
            output_hidden_states=request_taps(self.drafter.config), **{CACHE_NAME: self.cache}, **kwargs,
        )  # fmt: skip

    def _taps(self, outputs) -> list[torch.Tensor]:
        return select_taps(outputs, self.drafter.config)

    def _draft(self, anchors: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens (b, k) and their processed logits (b, k, V)."""
        positions = self._positions(self.drafter.config.block_size)
        hidden = self.block.hidden(anchors, self.context.commit(), self.valid, positions)
        logits = self.block.logits(hidden, limit)
        logits = logits[:, : draft_count(self.policy, logits, self.threshold)].to(anchors.device)
        if self.plain:
            return self.block.likeliest(logits), logits
        rows = [
            self.block.choose(self.processors[row], self.do_sample, self.texts[row], logits[i : i + 1])
            for i, row in enumerate(self.rows)
        ]
        return torch.cat([tokens for tokens, _ in rows]), self.block.whole(torch.cat([scores for _, scores in rows]))

    def _accept(
        self, drafts: torch.Tensor, draft_logits: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[list[list[int]], list[int]]:
        """Each row's accepted drafts with the bonus token behind them, and how many drafts that are."""
        logits = logits.to(dtype=torch.float32, device=drafts.device)
        for i, row in enumerate(self.rows) if not self.plain else ():
            logits[i] = self._processed(row, drafts[i : i + 1], logits[i])
        if self.do_sample:
            chosen, counts = speculative_sample(drafts, draft_logits, logits)
        else:
            chosen = logits.argmax(dim=-1)
            counts = (drafts == chosen[:, :-1]).int().cumprod(dim=1).sum(dim=1)
        *tokens, accepted = torch.cat([chosen, counts.unsqueeze(1)], dim=1).T.tolist()  # the one wait for the device
        return [list(row[: n + 1]) for row, n in zip(zip(*tokens, strict=True), accepted, strict=True)], accepted

    def _processed(self, row: int, drafts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """A row's scores (k + 1, V), each as its processors want it behind the row's text and the drafts before it."""
        processors, scores = self.processors[row], []
        if are_blind(processors):
            return processors(self.texts[row], logits) if processors else logits
        for place in range(len(logits)):
            prefix = torch.cat([self.texts[row], drafts[:, :place]], dim=1)
            scores.append(processors(prefix, logits[place : place + 1].clone()))
        return torch.cat(scores)

    def _keep_columns(self, outputs, positions: torch.Tensor, accepted: list[int], drafted: int) -> None:
        """Cuts the caches back to the longest accepted prefix, and hides in the other rows what they did not accept."""
        longest = max(accepted)
        if longest < drafted:
            self.cache.crop(longest - drafted)
        counts = torch.tensor(accepted, device=self.valid.device).unsqueeze(1)
        columns = torch.arange(longest + 1, device=self.valid.device) <= counts
        taps = [tap[:, : longest + 1] for tap in self._taps(outputs)]
        self.context.add(taps, positions[:, : longest + 1])
        self.valid = torch.cat([self.valid, columns], dim=1)
        self.filled = [filled + count + 1 for filled, count in zip(self.filled, accepted, strict=True)]

    def _add_tokens(self, chosen: list[list[int]]) -> list[bool]:
        """Adds each row's tokens, up to the first that ends it; says which rows have ended."""
        ended = []
        for row, tokens in zip(self.rows, chosen, strict=True):
            text = torch.cat([self.texts[row], self.texts[row].new_tensor([tokens])], dim=1)
            before = self.texts[row].shape[1]
            end = next((i for i, token in enumerate(tokens) if self._ends(text[:, : before + i + 1], token)), None)
            self.texts[row] = text if end is None else text[:, : before + end + 1]
            ended.append(end is not None)
        return ended

    def _ends(self, text: torch.Tensor, token: int) -> bool:
        if token in self.stops or text.shape[1] >= self.max_length:
            return True
        return any(fires(criterion, text) for criterion in self.criteria)

    def _drop(self, ended: list[bool]) -> None:
        """Takes finished rows out of the batch."""
        keep = [i for i, end in enumerate(ended) if not end]
        if len(keep) == len(self.rows):
            return
        self.rows, self.filled = [self.rows[i] for i in keep], [self.filled[i] for i in keep]
        if keep:
            indices = torch.tensor(keep, device=self.valid.device)
            self.valid = self.valid[indices]
            self.cache.batch_select_indices(indices)
            self.context.commit().select_rows(indices)

    def _clear_columns(self) -> None:
        """Moves each row's valid columns together, at the right, once a quarter of the columns is of no use to any."""
        width = max(self.filled)
        if self.valid.shape[1] <= 1.25 * width + SPARE_COLUMNS:
            return
        columns = self.valid.int().argsort(dim=1, stable=True)[:, -width:]
        for layer in self.cache.layers:
            layer.keys, layer.values = (gather_columns(states, columns) for states in (layer.keys, layer.values))
        self.context.commit().select_columns(columns)
        self.valid = self.valid.gather(1, columns)


def gather_columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(b, heads, columns, dim) with each row's columns (b, n) picked."""
    index = columns.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


def speculative_sample(
    drafts: torch.Tensor, draft_logits: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Speculative sampling (arXiv 2211.17192, algorithm 1) of every row: keeps each draft with probability min(1, p / q) and
    samples the token behind the last kept one from what is left of p.

    Args:
        drafts: (b, k). draft_logits: (b, k, V), or None if k is 0. logits: (b, k + 1, V) of the target.
    Returns:
        (b, k + 1) tokens, of which a row's first count + 1 hold, and the counts (b,).
    """
    p, k = logits.softmax(dim=-1), drafts.shape[1]
    left = p
    counts = drafts.new_zeros(len(drafts))
    if draft_logits is not None and k:
        q = draft_logits.float().softmax(dim=-1)
        odds = (p[:, :k].gather(2, drafts.unsqueeze(-1)) / q.gather(2, drafts.unsqueeze(-1))).squeeze(-1)
        counts = (torch.rand_like(odds) <= odds).int().cumprod(dim=1).sum(dim=1)
        left = torch.cat([(p[:, :k] - q).clamp(min=0), p[:, k:]], dim=1)
    row = torch.arange(len(drafts), device=drafts.device)
    rest = left[row, counts]
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p[row, counts])  # p equals q up to rounding
    chosen = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    chosen[row, counts] = torch.multinomial(rest, num_samples=1).squeeze(1).to(chosen.dtype)
    return chosen, counts


def _check_call(generation_config, logits_processor, streamer, model_kwargs: dict) -> None:
    if streamer is not None:
        raise ValueError("streamer: batches, and targets whose weights are all offloaded, have none; leave it out")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name):
            raise ValueError(
                f"{name} is True; with a drafter, batches (and wholly offloaded targets) return token ids alone"
            )
    for processor in logits_processor:
        if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
            raise ValueError("encoder_no_repeat_ngram_size belongs to one prompt; decode the sequences one by one")
    cache = model_kwargs[CACHE_NAME]
    check_cache(cache)
    if cache.get_seq_length():
        raise ValueError(
            f"the cache holds {cache.get_seq_length()} tokens already; a batch must start with an empty one"
        )


def _served_together(drafter, target, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> bool:
    """Whether the rows can share one pass: the target must take positions and masks, and see every column."""
    if "sliding_attention" in drafter.config.layer_types or generation_config.assistant_ensemble_weight is not None:
        return False
    if not {"attention_mask", "position_ids"} <= set(inspect.signature(target.forward).parameters):
        return False
    if "prepare_inputs_for_generation" in vars(target):  # an adapter puts something of its own into every pass
        return False
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask[:, -1].all()):
        return False
    given = {key for key, value in model_kwargs.items() if value is not None}
    return (
        _sees_all(target, model_kwargs[CACHE_NAME])
        and given <= SERVED_INPUTS
        and _usual_positions(input_ids, model_kwargs)
    )


def _sees_all(target, cache: Any) -> bool:
    """Whether every layer attends to every column, and its cache keeps them all: no windows, chunks or static buffers."""
    text: Any = target.config.get_text_config()
    usual = DynamicCache(config=text)  # as the target's layers want it, whatever cache the call brings
    kinds: set[Any] = {type(layer) for part in (cache, usual) for layer in part.layers} or {DynamicLayer}
    if type(cache) is not DynamicCache or kinds != {DynamicLayer} or getattr(cache, "offloading", False):
        return False
    return "local" not in (getattr(text, "attention_layers", None) or ())


def _usual_positions(input_ids: torch.Tensor, model_kwargs: dict) -> bool:
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    usual = mask.cumsum(dim=1) - 1
    return positions is None or (positions.dim() == 2 and bool(((positions == usual) | (mask == 0)).all()))


def _rows_of(target, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> list[dict]:
    """The inputs of each row on its own, each with a cache of its own."""
    count, rows = len(input_ids), []
    for row in range(count):
        kwargs = {key: _row_of(key, value, row, count) for key, value in model_kwargs.items() if key != CACHE_NAME}
        target._prepare_cache_for_generation(
            generation_config, kwargs, GenerationMode.ASSISTED_GENERATION, 1, generation_config.max_length - 1
        )
        rows.append(kwargs)
    return rows


def _row_of(name: str, value, row: int, count: int):
    """One sequence's part of an input: sequences lie along the first dimension, or the second of multimodal positions."""
    if isinstance(value, (dict, list, tuple)) and value:
        raise ValueError(f"{name} is a {type(value).__name__}, which cannot be cut into {count} sequences")
    if not isinstance(value, torch.Tensor):
        return value
    dim = 1 if name == "position_ids" and value.dim() == 3 else 0
    if value.dim() > dim and value.shape[dim] == count:
        return value.narrow(dim, row, 1)
    raise ValueError(f"{name} has the shape {tuple(value.shape)}, which cannot be cut into {count} sequences")


def _row_processors(processors: Sequence, row: int, count: int) -> LogitsProcessorList:
    """The processors of a call as one row of `count` needs them: those that know its place in the batch are bound to it."""
    return LogitsProcessorList([_bound_to(processor, row, count) for processor in processors])


def _bound_to(processor, row: int, count: int):
    kept = PER_ROW & set(getattr(processor, "__dict__", ()))
    if not kept and not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    bound = copy.copy(processor)
    for name in kept:
        value = getattr(bound, name)
        if isinstance(value, torch.Tensor):  # of each prompt, which may have several answers
            place = row * len(value) // count
            setattr(bound, name, value[place : place + 1])
    if isinstance(bound, PrefixConstrainedLogitsProcessor):
        allowed, prompt = bound._prefix_allowed_tokens_fn, row // bound._num_beams
        bound._num_beams = 1
        bound._prefix_allowed_tokens_fn = lambda _, ids: allowed(prompt, ids)
    return bound


def _padded(rows: Sequence[torch.Tensor], generation_config) -> torch.Tensor:
    """(1, n) each as one tensor, the shorter ones padded on the right."""
    pad = getattr(generation_config, "_pad_token_tensor", None)
    value = 0 if pad is None else int(pad)
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True, padding_value=value)
