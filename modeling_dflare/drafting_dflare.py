"""
One draft: anchors go in through the target's embedding, a block comes out through its head, and of it the draft tokens.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Processors that ask nothing of the text so far.
BLIND = {TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper}
BLIND |= {EpsilonLogitsWarper, EtaLogitsWarper, InfNanRemoveLogitsProcessor, LogitNormalization}
# What transformers fills in where nobody asked: no limit, no threshold.
STOCK_NUM_ASSISTANT_TOKENS = 20
STOCK_CONFIDENCE_THRESHOLD = 0.4
MAX_WAITING = 256  # passes of the target whose states may wait for the next draft

_restricted: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # drafter -> head -> its restricted copy


class ContextFeed:
    """
    The target's states on their way into a drafter's context cache. They wait until a draft needs them, so that plain steps
    cost no more than ordinary decoding.
    """

    def __init__(self, drafter: PreTrainedModel):
        self.drafter = drafter
        self.cache = drafter.new_context_cache()
        self.waiting: list[tuple[list[torch.Tensor], torch.Tensor | None]] = []
        self.padding: torch.Tensor | None = None  # (b, n), of the prompts that wait
        self.num_waiting = 0  # tokens

    @property
    def length(self) -> int:
        """Tokens in the cache, and those that wait."""
        return self.cache.length + self.num_waiting

    def add_prompts(self, taps: list[torch.Tensor], positions: torch.Tensor, valid: torch.Tensor) -> None:
        """As `add`, of left-padded prompts, where `valid` (b, n) tells tokens from padding, whose states may be NaN."""
        self.padding = ~valid
        self.add(taps, positions)

    def add(self, taps: list[torch.Tensor], positions: torch.Tensor | None = None) -> None:
        """T tensors (b, n, H) of committed tokens; `positions` (b, n) if they do not simply run on, and then always."""
        self.waiting.append((taps, positions))
        self.num_waiting += taps[0].shape[1]
        if len(self.waiting) > MAX_WAITING:
            self.commit()

    def commit(self) -> Any:
        """The `ContextCache`, with what has waited."""
        if self.padding is not None:  # nobody will look at these states, but NaN would spread
            taps, _ = self.waiting[0]
            taps[:] = [tap.masked_fill(self.padding.unsqueeze(-1).to(tap.device), 0.0) for tap in taps]
            self.padding = None
        if self.waiting:
            pieces, positions = zip(*self.waiting, strict=True)
            taps = [torch.cat(states, dim=1) if len(pieces) > 1 else states[0] for states in zip(*pieces, strict=True)]
            if positions[0] is None:
                self.drafter.extend_context(taps, self.cache)
            else:
                self.drafter.extend_context(taps, self.cache, torch.cat(positions, dim=1))
            self.waiting, self.num_waiting = [], 0
        return self.cache


class BlockDrafter:
    """
    A drafter between the embedding and the head of one target, for one call of `generate()`. Both are modules to be
    called: they may be quantised, scaled, wrapped, or lie elsewhere.

    Args:
        drafter: a `DFlareForBlockDiffusion`. target: the model it drafts for.
        input_ids: the call's, whose device the target's outputs return to.
    """

    def __init__(self, drafter: PreTrainedModel, target: PreTrainedModel, input_ids: torch.Tensor):
        self.drafter = drafter
        self.embed = target.get_input_embeddings()
        self.head, self.token_ids = drafting_head(drafter, target.get_output_embeddings())
        # Accelerate's hooks move inputs on from the target's first device where its parts lie apart.
        self.place = (input_ids.device if target.device.type == "meta" else target.device, target.dtype)
        self.mask_ids = input_ids.new_full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)

    def hidden(self, anchors: torch.Tensor, cache, mask=None, positions=None) -> torch.Tensor:
        """
        Final hidden states (b, block, H) of the blocks that start at `anchors` (b, 1).

        Args:
            cache: the `ContextCache` of these sequences.
            mask: (b, context), the context's visible columns; None if all are.
            positions: (b, block); None if they run on from the cache.
        """
        block = torch.cat([anchors, self.mask_ids.expand(len(anchors), -1).to(anchors.device)], dim=1)
        noise = self.embed(block.to(self.place[0])).to(self.drafter.device, self.drafter.dtype)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(block).bool()], dim=1).to(noise.device)
        positions = None if positions is None else positions.to(noise.device)
        return self.drafter(
            noise_embeds=noise, cache=cache, attention_mask=mask, position_ids=positions
        ).last_hidden_state

    def logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """
        Of the first `count` drafts, (b, count, rows of the head). The anchor's row goes through the head too and is thrown
        away: a block has as many rows as matrix libraries like, and one less can cost twice the time (8 rows 16 ms, 7 rows
        34 ms in fp32 on an AMD EPYC).
        """
        rows = hidden[:, : count + 1].contiguous()  # a linear layer takes fifty times as long on a slice of a batch
        return self.head(rows.to(*self.place))[:, 1:]

    def choose(
        self, processors, do_sample: bool, input_ids: torch.Tensor, logits: torch.Tensor, end: Callable | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Draft tokens (1, k) and their logits, processed where there are processors: they see each token's own prefix, with a
        criterion `end` none behind which it fires, and all of the vocabulary. Processors that ask nothing of the text, and
        sampling, see only what is ever drafted.
        """
        if not processors and not do_sample:
            return self.likeliest(logits), logits
        if are_blind(processors):
            scores = processors(input_ids, logits[0].float()) if processors else logits[0].float()
            return self._tokens(_pick(scores, do_sample).T), scores.unsqueeze(0)
        logits = self.whole(logits.float())
        prefix, processed = input_ids, []
        for position in range(logits.shape[1]):
            scores = self._some_left(processors(prefix, logits[:, position].clone()))
            processed.append(scores)
            prefix = torch.cat([prefix, _pick(scores, do_sample)], dim=-1)
            if end is not None and fires(end, prefix):
                break
        return prefix[:, input_ids.shape[1] :], torch.stack(processed, dim=1) if processed else logits

    def _some_left(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V), all alike where processors left none of a draft vocabulary: any draft is as good there."""
        if self.token_ids is None:
            return scores
        return scores.masked_fill(scores.isneginf().all(dim=-1, keepdim=True), 0.0)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids (b, k) of the largest logits; `max` finds them sooner than `argmax` in bf16."""
        return self._tokens(logits.max(dim=-1).indices)

    def _tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the head as token ids."""
        return rows if self.token_ids is None else self.token_ids.to(rows.device)[rows]

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (b, k, V) over the whole vocabulary, where they were of the tokens alone that are ever drafted."""
        if self.token_ids is None or logits.shape[-1] == self.drafter.config.vocab_size:
            return logits
        whole = logits.new_full((*logits.shape[:2], self.drafter.config.vocab_size), float("-inf"))
        return whole.index_copy_(2, self.token_ids.to(logits.device), logits)


class RestrictedHead(nn.Module):
    """
    The rows of a target's head for some tokens only, as a copy of its own.

    Args:
        head: the target's output embedding. It is read, not called, so it must be a plain linear layer in memory.
        token_ids: ascending distinct ids to keep.

    Raises:
        ValueError: if the head is anything else.
    """

    token_ids: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, head: nn.Module, token_ids: torch.Tensor):
        super().__init__()
        if not can_be_restricted(head):
            raise ValueError(f"only a plain linear head can be cut to some of its rows, but the target's is {head}")
        weight: Any = head.weight
        bias: Any = head.bias
        token_ids = token_ids.to(weight.device)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("weight", weight.detach()[token_ids], persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach()[token_ids], persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits (..., tokens kept)."""
        return nn.functional.linear(hidden_states, self.weight, self.bias)


def can_be_restricted(head: nn.Module) -> bool:
    """Whether a head is a plain linear layer, neither quantised nor wrapped nor kept elsewhere by accelerate."""
    return type(head) is nn.Linear and not hasattr(head, "_hf_hook") and not head.weight.is_meta


def drafting_head(drafter: PreTrainedModel, head: nn.Module) -> tuple[nn.Module, torch.Tensor | None]:
    """The head to draft with and the tokens of its rows: all of it (None), or the rows of the draft vocabulary."""
    token_ids: Any = drafter.draft_token_ids
    if token_ids is None:
        return head, None
    if not can_be_restricted(head):
        logger.warning_once(
            f"draft_vocab_size is {len(token_ids)}, but the target's head is a {type(head).__name__} whose rows cannot be "
            "picked: drafting with all of it"
        )
        return head, None
    heads = _restricted.setdefault(drafter, weakref.WeakKeyDictionary())
    weight: Any = head.weight
    stamp = (weight.data_ptr(), weight.dtype, token_ids.data_ptr())  # a target that moves gets new rows
    if head not in heads or heads[head][0] != stamp:
        heads[head] = (stamp, RestrictedHead(head, token_ids))
    return heads[head][1], token_ids


def fires(criterion: Callable, ids: torch.Tensor) -> bool:
    """Whether a stopping criterion ends the sequence `ids` (1, length); one of a user's own may answer with a bool."""
    return bool(torch.as_tensor(criterion(ids, None)).any())


def are_blind(processors) -> bool:
    """Whether logits processors look at each row of scores alone, so that many places can pass through them at once."""
    return all(type(processor) in BLIND for processor in processors)


def _pick(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """A token (n, 1) for each row of scores (n, V)."""
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1) if do_sample else scores.argmax(-1, keepdim=True)


def is_strict(processor) -> bool:
    """Whether a logits processor may refuse to be shown what no ordinary decoding shows it, such as text behind its end."""
    own = not type(processor).__module__.startswith("transformers.")
    return own or isinstance(processor, PrefixConstrainedLogitsProcessor)


def draft_limit(config, generation_config) -> int:
    """
    Drafts to verify per round at most: the block without its anchor, or fewer if the drafter's `num_draft_tokens` or the
    call's `num_assistant_tokens` says so. The block itself is always drafted at its trained size.
    """
    asked = generation_config.num_assistant_tokens
    limits = (config.block_size - 1, config.num_draft_tokens, None if asked == STOCK_NUM_ASSISTANT_TOKENS else asked)
    return max(0, min(limit for limit in limits if limit is not None))


def confidence_threshold(generation_config) -> float | None:
    """The call's `assistant_confidence_threshold`: drafts end before the first whose likeliest token is less likely."""
    asked = generation_config.assistant_confidence_threshold
    return None if asked in (None, 0, STOCK_CONFIDENCE_THRESHOLD) else asked


def draft_count(policy, logits: torch.Tensor, threshold: float | None) -> int:
    """
    How many of the drafts to verify, by their distributions (b, limit, V) before any processor. Rows share one width, so
    the threshold ends a batch's drafts where it has ended those of every row.
    """
    if not policy.wants_confidences and threshold is None:
        return policy.choose(logits.shape[1])
    confidences = logits.softmax(dim=-1).amax(dim=-1).nan_to_num().tolist()
    if threshold is not None:
        ends = [next((place for place, c in enumerate(row) if c < threshold), len(row)) for row in confidences]
        confidences = [row[: max(ends)] for row in confidences]
    return policy.choose(len(confidences[0]), confidences)
