"""Several sequences in one call: each row is what it would be on its own, however the others fare."""

import pytest
import torch
from transformers import GenerationConfig, TextStreamer
from transformers.cache_utils import StaticLayer
from transformers.generation.stopping_criteria import StoppingCriteriaList

import dflare.batches_dflare as batches
from dflare.hook_dflare import install_hook, uninstall_hook
from helpers import ByConfidence, both, greedy, prompts_of, tiny_drafter, tiny_target
from zoo import build

LENGTH, PADDING = 9, (4, 0, 7, 2)  # tokens of each row that are padding


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)


def padded_batch(rows: int = 4) -> dict:
    """Prompts of unequal lengths, padded on the left."""
    ids = prompts_of(rows, LENGTH)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : PADDING[row]] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("budget", [1, 2, 5, 30])
def test_rows_that_accept_unequally(target, drafter, oracle, budget):
    batch = padded_batch()
    oracle(greedy(target, **batch, max_new_tokens=budget + 8))
    with drafter.record_drafts() as records:
        ordinary, ours = both(target, drafter, batch, max_new_tokens=budget)
    assert torch.equal(ordinary, ours)
    if budget == 30:
        assert len(records) == 4 and len({tuple(record.acceptance_lengths) for record in records}) > 1
        assert max(record.acceptance_length for record in records) > 2


def test_each_row_is_its_own_single_run(target, drafter, oracle):
    batch = padded_batch()
    oracle(greedy(target, **batch, max_new_tokens=40))
    ours = greedy(target, **batch, max_new_tokens=30, assistant_model=drafter)
    for row, padding in enumerate(PADDING):
        alone = greedy(target, batch["input_ids"][row : row + 1, padding:], max_new_tokens=30, assistant_model=drafter)
        assert torch.equal(ours[row, padding:], alone[0])


@pytest.mark.parametrize("spare", [-1000, 0])
def test_hidden_columns_are_cleared(target, drafter, oracle, monkeypatch, spare):
    batch, widths = padded_batch(), []
    oracle(greedy(target, **batch, max_new_tokens=80))
    monkeypatch.setattr(batches, "SPARE_COLUMNS", spare)
    original = batches.BatchDecoder._clear_columns

    def watched(self):
        original(self)
        widths.append((self.valid.shape[1], max(self.filled), self.cache.get_seq_length(), self.context.length))

    monkeypatch.setattr(batches.BatchDecoder, "_clear_columns", watched)
    ordinary, ours = both(target, drafter, batch, max_new_tokens=70)
    assert torch.equal(ordinary, ours)
    assert all(columns == cached == context for columns, _, cached, context in widths)
    assert all(columns <= 1.25 * needed + max(spare, 0) for columns, needed, _, _ in widths)


def test_rows_that_finish_early(target, drafter, oracle):
    batch = padded_batch()
    truth = greedy(target, **batch, max_new_tokens=50)
    oracle(truth)
    stops = [int(truth[0, LENGTH + 3]), int(truth[2, LENGTH + 11])]
    ordinary, ours = both(target, drafter, batch, max_new_tokens=40, eos_token_id=stops)
    assert torch.equal(ordinary, ours)
    assert (ours[:, -1] == 0).any() and not (ours[:, LENGTH:] == 0).all()


def test_several_answers_to_each_prompt(target, drafter):
    batch = padded_batch(2)
    ordinary = greedy(target, **batch, max_new_tokens=6).repeat_interleave(3, dim=0)
    torch.manual_seed(0)
    ours = target.generate(
        **batch, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=6, assistant_model=drafter
    )
    assert torch.equal(ordinary, ours)


def test_a_dictionary_holds_the_same_tokens(target, drafter):
    batch = padded_batch(2)
    ordinary, ours = both(target, drafter, batch, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(ordinary.sequences, ours.sequences) and type(ours) is type(ordinary)


def only_even(batch_id: int, ids: torch.Tensor) -> list[int]:
    return list(range(2 + batch_id, 64, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
        {"bad_words_ids": [[7], [8, 9]]},
        {"prefix_allowed_tokens_fn": only_even},
        {"encoder_repetition_penalty": 1.5},
        {"suppress_tokens": [5, 6], "begin_suppress_tokens": [9]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_logits_processors(target, drafter, oracle, options):
    batch = padded_batch()
    ordinary = greedy(target, **batch, max_new_tokens=20, pad_token_id=0, **options)
    oracle(ordinary)
    assert torch.equal(
        ordinary, greedy(target, **batch, max_new_tokens=20, pad_token_id=0, **options, assistant_model=drafter)
    )


def test_custom_criteria_end_their_own_row(target, drafter, oracle):
    batch = padded_batch()
    truth = greedy(target, **batch, max_new_tokens=40)
    oracle(truth)
    stop = int(truth[1, LENGTH + 4])

    def at_stop(input_ids, scores, **kwargs):
        return input_ids[:, -1] == stop

    ours = greedy(
        target, **batch, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([at_stop]), assistant_model=drafter
    )
    for row in range(4):
        answer = truth[row, LENGTH : LENGTH + 30].tolist()
        expected = answer[: answer.index(stop) + 1] if stop in answer else answer
        assert ours[row, LENGTH : LENGTH + len(expected)].tolist() == expected
        assert not ours[row, LENGTH + len(expected) :].any()


@pytest.mark.parametrize("case", ["sliding window", "static cache", "embeddings"])
def test_what_is_decoded_row_by_row(target, drafter, monkeypatch, case):
    monkeypatch.setattr(batches.BatchDecoder, "run", None)
    batch, options = padded_batch(3), {"max_new_tokens": 12}
    if case == "sliding window":
        target = build("Mistral, sliding window")
        drafter = tiny_drafter(target)
    if case == "static cache":
        if not StaticLayer.is_croppable:
            pytest.skip("this transformers cannot roll a static cache back")
        options["cache_implementation"] = "static"
    if case == "embeddings":
        batch = {"inputs_embeds": target.get_input_embeddings()(prompts_of(3, 6))}
    ordinary, ours = (
        target.generate(**batch, **options, do_sample=False, **more) for more in ({}, {"assistant_model": drafter})
    )
    assert torch.equal(ordinary, ours)


def test_what_batches_refuse(target, drafter):
    batch = padded_batch(2)
    ids = batch["input_ids"]
    with pytest.raises(ValueError, match="output_scores is True"):
        target.generate(**batch, return_dict_in_generate=True, output_scores=True, assistant_model=drafter)
    with pytest.raises(ValueError, match="streamer"):
        target.generate(**batch, streamer=Sink(), assistant_model=drafter)
    cache = target(ids[:, :3]).past_key_values
    with pytest.raises(ValueError, match="the cache holds 3 tokens"):
        target.generate(**batch, past_key_values=cache, assistant_model=drafter)


class Sink(TextStreamer):
    """Takes everything."""

    def __init__(self):
        pass

    def put(self, value):
        pass


@pytest.mark.parametrize(("by_confidence", "draft_vocabulary"), [(False, None), (True, None), (False, [1, 3, 4])])
def test_sampling_keeps_each_rows_distribution(monkeypatch, by_confidence, draft_vocabulary):
    """Two tokens of two prompts, vocabulary of six, against the target's exact probabilities."""
    if by_confidence:
        monkeypatch.setattr("dflare.batches_dflare.policy_for", lambda *args: ByConfidence(0.5))
    vocabulary, runs = 6, 400
    target = tiny_target(vocab_size=vocabulary)
    drafter = tiny_drafter(target, mask_token_id=0)
    drafter.set_draft_vocabulary(draft_vocabulary)
    ids = torch.tensor([[3, 5, 4], [4, 4, 1]])
    torch.manual_seed(0)
    counts = torch.zeros(2, vocabulary, vocabulary)
    options = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=5, num_return_sequences=runs // 4)
    with drafter.record_drafts() as records:
        for _ in range(4):
            output = target.generate(input_ids=ids, generation_config=options, assistant_model=drafter)
            for place, tokens in enumerate(output[:, 3:5].tolist()):
                counts[place // (runs // 4), tokens[0], tokens[1]] += 1
    drafted = {round.drafted for record in records for round in record.rounds}
    assert len(drafted) > 1 or not by_confidence
    for row, prompt in enumerate(ids):
        every = torch.arange(vocabulary).unsqueeze(1)
        first = target(prompt[None]).logits[0, -1].softmax(-1)
        second = target(torch.cat([prompt.expand(vocabulary, -1), every], dim=1)).logits[:, -1].softmax(-1)
        expected = (first[:, None] * second * runs).flatten()
        common = expected >= 5
        statistic = ((counts[row].flatten() - expected) ** 2 / expected)[common].sum()
        freedom = int(common.sum())
        assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5


def test_attached_targets_take_batches(target, drafter):
    other = tiny_target(seed=3)
    drafter = tiny_drafter(other)
    batch = padded_batch(2)
    uninstall_hook()
    try:
        with pytest.raises((ValueError, AttributeError)):
            greedy(other, **batch, max_new_tokens=5, assistant_model=drafter)
        drafter.attach(other)
        ordinary, ours = both(other, drafter, batch, max_new_tokens=5)
        assert torch.equal(ordinary, ours) and type(other).__name__ == "LlamaForCausalLM"
        drafter.detach(other)
        with pytest.raises((ValueError, AttributeError)):
            greedy(other, **batch, max_new_tokens=5, assistant_model=drafter)
    finally:
        install_hook()
