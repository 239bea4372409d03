"""A drafter that drafts some tokens only: the same output, the saved rows, and the head of which no more is computed."""

import pytest
import torch
from torch import nn

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.drafting_dflare import BlockDrafter, RestrictedHead
from helpers import greedy, prompt_of, prompts_of, tiny_drafter, tiny_target

SOME = [3, 5, 8, 13, 21, 34, 55]


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    drafter = tiny_drafter(target)
    drafter.set_draft_vocabulary(SOME)
    return drafter


def test_output_is_the_same_and_drafts_are_of_the_vocabulary(target, drafter, monkeypatch):
    drafted, original = [], BlockDrafter.choose

    def watched(self, *args):
        tokens, logits = original(self, *args)
        drafted.extend(tokens.flatten().tolist())
        return tokens, logits

    monkeypatch.setattr(BlockDrafter, "choose", watched)
    for options in ({}, {"repetition_penalty": 1.3}, {"assistant_ensemble_weight": 1 - 1e-9}):
        ordinary = {key: value for key, value in options.items() if not key.startswith("assistant")}
        expected = greedy(target, prompt_of(6), max_new_tokens=30, **ordinary)
        assert torch.equal(
            greedy(target, prompt_of(6), max_new_tokens=30, **options, assistant_model=drafter), expected
        )
    batch = prompts_of(3, 6)
    expected = greedy(target, batch, max_new_tokens=20)
    assert torch.equal(greedy(target, batch, max_new_tokens=20, assistant_model=drafter), expected)
    assert drafted and set(drafted) <= set(SOME)


def test_drafts_are_the_likeliest_of_the_vocabulary(target, drafter):
    whole = tiny_drafter(target)
    whole.load_state_dict(drafter.state_dict(), strict=False)
    logits = {}
    for name, model in (("some", drafter), ("all", whole)):
        block, cache = BlockDrafter(model, target, prompt_of(4)), model.new_context_cache()
        logits[name] = block.logits(block.hidden(prompt_of(1), cache), 3)
    torch.testing.assert_close(logits["some"], logits["all"][..., SOME])
    likeliest = BlockDrafter(drafter, target, prompt_of(4)).likeliest(logits["some"])
    assert torch.equal(likeliest, torch.tensor(SOME)[logits["all"][..., SOME].argmax(-1)])


def test_it_is_saved_with_the_drafter_and_lifted_again(drafter, tmp_path):
    drafter.float().save_pretrained(tmp_path)
    loaded = DFlareForBlockDiffusion.from_pretrained(tmp_path)
    assert loaded.config.draft_vocab_size == len(SOME) and loaded.draft_token_ids.tolist() == SOME
    loaded.set_draft_vocabulary(None)
    assert loaded.config.draft_vocab_size is None and "draft_token_ids" not in loaded.state_dict()


def test_a_target_that_changes_gets_new_rows(target, drafter):
    greedy(target, prompt_of(4), max_new_tokens=4, assistant_model=drafter)
    target.lm_head.weight = nn.Parameter(target.lm_head.weight.detach() * 2)
    assert torch.equal(BlockDrafter(drafter, target, prompt_of(4)).head.weight, target.lm_head.weight[SOME])


def test_what_is_refused(target, drafter):
    for ids, found in (([], "empty"), ([3, 64], "3..64"), ([-1, 2], "-1..2")):
        with pytest.raises(ValueError, match=f"token_ids is {found}, but vocab_size is 64"):
            drafter.set_draft_vocabulary(ids)
    with pytest.raises(ValueError, match="draft_vocab_size is 65, above vocab_size 64"):
        DFlareConfig.from_target(target.config, num_hidden_layers=1, num_taps=2, draft_vocab_size=65)
    with pytest.raises(ValueError, match="only a plain linear head"):
        RestrictedHead(nn.Sequential(nn.Linear(4, 4)), torch.arange(2))
