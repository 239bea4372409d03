"""Parity with what the published reference computes (tests/golden/README.md)."""

import pytest
import torch
from safetensors.torch import load_file

from dflare import DFlareForBlockDiffusion
from dflare.training.loss import block_loss
from helpers import GOLDEN, golden_target

KINDS = ("dflare", "dflash")
# Logits are of size 10 to 20 here, so 1e-5 of the hidden states is a few units in their last place.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_draft_steps(kind, attention):
    drafter = DFlareForBlockDiffusion.from_pretrained(GOLDEN / f"{kind}_tiny", attn_implementation=attention)
    target, expected = golden_target(kind), load_file(GOLDEN / f"{kind}_tiny" / "expected.safetensors")
    cache = drafter.new_context_cache()
    for step, committed in (("1", 11), ("2", 14)):
        with torch.no_grad():
            hidden = drafter(
                noise_embeds=target.get_input_embeddings()(expected[f"block_ids_{step}"]),
                context_hidden_states=expected[f"context_hidden_states_{step}"],
                cache=cache,
            ).last_hidden_state
            logits = target.get_output_embeddings()(hidden[:, 1:])
        torch.testing.assert_close(hidden, expected[f"draft_hidden_{step}"], **TOLERANCE)
        torch.testing.assert_close(logits, expected[f"draft_logits_{step}"], **TOLERANCE)
        assert cache.length == committed


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_continuation_is_the_targets_own(kind):
    drafter = DFlareForBlockDiffusion.from_pretrained(GOLDEN / f"{kind}_tiny", draft_policy="fixed")
    expected = load_file(GOLDEN / f"{kind}_tiny" / "expected.safetensors")
    answer = expected["ar"]
    budget = answer.shape[1] - expected["input_ids"].shape[1]
    with drafter.record_drafts() as records:
        output = golden_target(kind).generate(
            input_ids=expected["input_ids"], assistant_model=drafter, max_new_tokens=budget, do_sample=False
        )
    assert output.tolist() == answer.tolist()
    whole = list(records[0].acceptance_lengths)
    advances = expected["advance_per_step"].tolist()
    assert whole == advances[: len(whole)] and len(whole) >= 30


@pytest.mark.parametrize(
    ("kind", "gamma"),
    [("dflare", g) for g in ("none", "4.0", "4.5", "7.0")] + [("dflash", g) for g in ("none", "4.0", "7.0")],
)
def test_loss_and_gradients(kind, gamma):
    drafter = DFlareForBlockDiffusion.from_pretrained(GOLDEN / f"{kind}_tiny")
    target, expected = golden_target(kind), load_file(GOLDEN / f"{kind}_tiny" / "loss.safetensors")
    loss = block_loss(
        drafter,
        target.get_input_embeddings(),
        target.get_output_embeddings(),
        expected["input_ids"],
        expected["loss_mask"],
        expected["context_hidden_states"].split(target.config.hidden_size, dim=-1),
        expected["anchor_positions"],
        expected["block_keep_mask"],
        None if gamma == "none" else float(gamma),
    )
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in drafter.parameters()]).norm()
    torch.testing.assert_close(loss, expected[f"loss_gamma_{gamma}"], **TOLERANCE)
    torch.testing.assert_close(norm, expected[f"grad_norm_gamma_{gamma}"], **TOLERANCE)
    if kind == "dflare":
        gradient = drafter.layer_fusion_weights.grad
        torch.testing.assert_close(gradient, expected[f"grad_fusion_gamma_{gamma}"], **TOLERANCE)
