"""What training computes for the block at an anchor is what generation computes when the prefix ends there."""

import pytest
import torch

from dflare.candidates_dflare import request_taps, select_taps
from dflare.training.anchors import block_mask
from dflare.training.loss import block_hidden_states
from helpers import prompt_of, tiny_drafter, tiny_target

LENGTH = 24
VARIANTS = {
    "dflare": {},
    "without softmax": dict(fusion_softmax=False),
    "without separate K/V": dict(separate_context_kv=False),
    "dflash": dict(fusion="shared_fc"),
    "added fully-connected layer": dict(fusion_fc=True),
    "sliding window": dict(
        use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "longrope": dict(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [4.0] * 8,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 8,
            "factor": 4.0,
        }
    ),
    "partial rotary": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ),
}


def pair(**overrides):
    target = tiny_target(dtype=torch.float32)
    return target, tiny_drafter(target, **overrides)


def taps_of(target, drafter, ids):
    with torch.no_grad():
        return select_taps(target(input_ids=ids, output_hidden_states=request_taps(drafter.config)), drafter.config)


@torch.no_grad()
def trained(target, drafter, ids, taps, anchors):
    anchors = torch.as_tensor([anchors])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    hidden = block_hidden_states(drafter, target.get_input_embeddings(), ids, taps, anchors, keep)
    return target.get_output_embeddings()(hidden)[0]


@torch.no_grad()
def generated(target, drafter, ids, taps, anchor, pieces):
    """The block's logits with the context before `anchor` fed in pieces of the given sizes, the last one the rest."""
    cache, start = drafter.new_context_cache(), 0
    for size in [*pieces, anchor]:
        end = min(start + size, anchor)
        if end > start:
            drafter.extend_context([tap[:, start:end] for tap in taps], cache)
        start = end
    block = ids.new_full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[0, 0] = ids[0, anchor]
    hidden = drafter(noise_embeds=target.get_input_embeddings()(block), cache=cache).last_hidden_state
    assert cache.length == anchor, "the cache holds the committed tokens only"
    return target.get_output_embeddings()(hidden)[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", VARIANTS)
def test_teacher_forced_parity_at_every_anchor(name, attention):
    target, drafter = pair(**VARIANTS[name])
    drafter.set_attn_implementation(attention)
    ids = prompt_of(LENGTH)
    taps = taps_of(target, drafter, ids)
    anchors = list(range(1, LENGTH))
    in_training = trained(target, drafter, ids, taps, anchors)
    for row, anchor in enumerate(anchors):
        for pieces in ([], [5, 1, 7, 2, 1], [1] * LENGTH):
            in_generation = generated(target, drafter, ids, taps, anchor, pieces)
            torch.testing.assert_close(in_training[row], in_generation, rtol=1e-4, atol=1e-4)


def test_only_features_before_the_anchor_matter():
    target, drafter = pair()
    ids, anchor = prompt_of(LENGTH), 10
    taps = taps_of(target, drafter, ids)
    before = trained(target, drafter, ids, taps, [anchor, 15])
    for place in range(LENGTH):
        changed = [tap.clone() for tap in taps]
        changed[1][:, place] += 1.0
        after = trained(target, drafter, ids, changed, [anchor, 15])
        assert torch.equal(before[0], after[0]) == (place >= anchor)


def test_a_block_sees_all_of_itself_and_nothing_of_others():
    target, drafter = pair()
    taps = taps_of(target, drafter, prompt_of(LENGTH))
    anchors = torch.tensor([[6, 9]])
    mask = block_mask(anchors, torch.ones_like(anchors, dtype=torch.bool), 4, torch.zeros(1, LENGTH, dtype=torch.long))
    positions = torch.cat([torch.arange(LENGTH), torch.arange(6, 10), torch.arange(9, 13)])[None]
    noise = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))

    def outputs(noise):
        with torch.no_grad():
            return drafter(noise, taps, attention_mask=mask, position_ids=positions).last_hidden_state[0]

    for attention in ("eager", "sdpa"):
        drafter.set_attn_implementation(attention)
        changed = noise.clone()
        changed[:, 3] += 1.0
        moved = (outputs(changed) - outputs(noise)).abs().amax(dim=-1) > 0
        assert moved.tolist() == [True] * 4 + [False] * 4


def test_batched_rows_equal_single_rows():
    target, drafter = pair()
    ids = torch.cat([prompt_of(LENGTH), prompt_of(LENGTH, seed=5)])
    taps = taps_of(target, drafter, ids)
    anchors, keep = torch.tensor([[3, 7], [9, 0]]), torch.tensor([[True, True], [True, False]])
    with torch.no_grad():
        hidden = block_hidden_states(drafter, target.get_input_embeddings(), ids, taps, anchors, keep)
        assert torch.isfinite(hidden).all()
        alone = block_hidden_states(
            drafter, target.get_input_embeddings(), ids[1:], [tap[1:] for tap in taps], anchors[1:, :1], keep[1:, :1]
        )
    torch.testing.assert_close(hidden[1:, :1], alone, rtol=1e-5, atol=1e-5)


def test_native_contract_takes_concatenated_taps():
    target, drafter = pair()
    ids, anchor = prompt_of(LENGTH), 12
    taps = [tap[:, :anchor] for tap in taps_of(target, drafter, ids)]
    block = ids.new_full((1, 4), drafter.config.mask_token_id)
    noise = target.get_input_embeddings()(block)
    with torch.no_grad():
        apart = drafter(noise, taps, cache=drafter.new_context_cache()).last_hidden_state
        together = drafter(noise, torch.cat(taps, dim=-1)).last_hidden_state
        ones = torch.ones(1, anchor + 4)
        masked = drafter(noise, torch.cat(taps, dim=-1), attention_mask=ones).last_hidden_state
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(masked, together, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="128 wide.*192"):
        drafter(noise, torch.cat(taps[:2], dim=-1))


@pytest.mark.parametrize("variant", ["dflare", "sliding window"])
def test_every_kind_of_attention_agrees(variant):
    """On one batch of several blocks, some of them padding. Flex attention runs on CPUs without gradients only."""
    target, drafter = pair(**VARIANTS[variant])
    embed, ids = target.get_input_embeddings(), torch.cat([prompt_of(LENGTH), prompt_of(LENGTH, seed=5)])
    taps = taps_of(target, drafter, ids)
    for width in (2, 3):  # another number of anchors
        anchors = torch.tensor([[3, 7, 14], [9, 15, 0]])[:, :width]
        keep = torch.tensor([[True, True, True], [True, True, False]])[:, :width]
        outputs = {}
        for attention in ("eager", "sdpa", "flex_attention"):
            drafter.set_attn_implementation(attention)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                outputs[attention] = block_hidden_states(drafter, embed, ids, taps, anchors, keep)
        for output in outputs.values():
            torch.testing.assert_close(output, outputs["sdpa"], rtol=1e-4, atol=1e-4)
