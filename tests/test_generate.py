"""Plain generate(assistant_model=drafter) against the same call without it."""

import threading

import pytest
import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from dflare import DFlareConfig, DFlareForBlockDiffusion, install_hook, uninstall_hook
from dflare.checks_dflare import CACHE_NAME
from helpers import Collect, greedy, make_oracle, prompt_of, tiny_drafter, tiny_target
from zoo import build


@pytest.fixture(scope="module")
def target():
    return tiny_target()


class StopAtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, dtype=torch.bool)


# ------------------------------------------------------------------------------------------------- oracle: roll-back


@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("length", [1, 2, 11, 40])
def test_every_position_spoiled_once(target, block_size, length):
    prompt = prompt_of(length)
    truth = greedy(target, prompt, max_new_tokens=60)
    for spoiled in [*range(1, block_size), None]:
        drafter = tiny_drafter(target, block_size)
        make_oracle(drafter, truth, spoiled)
        with drafter.record_drafts() as records:
            output = greedy(target, prompt, max_new_tokens=40, assistant_model=drafter)
        assert output.tolist() == truth[:, : length + 40].tolist()
        lengths = set(records[0].acceptance_lengths)
        assert lengths == {spoiled or block_size}, "k - 1 accepted drafts and the bonus token"


def test_every_budget(target):
    prompt, block_size = prompt_of(7), 4
    truth = greedy(target, prompt, max_new_tokens=30)
    for budget in range(1, 2 * block_size + 2):
        for spoiled in (1, 3, None):
            drafter = tiny_drafter(target, block_size)
            make_oracle(drafter, truth, spoiled)
            output = greedy(target, prompt, max_new_tokens=budget, assistant_model=drafter)
            assert output.tolist() == truth[:, : 7 + budget].tolist()


@pytest.mark.parametrize("place", range(1, 10))
def test_eos_anywhere_in_a_block(target, place):
    prompt = prompt_of(5)
    truth = greedy(target, prompt, max_new_tokens=40)
    eos = int(truth[0, 5 + place])
    expected = greedy(target, prompt, max_new_tokens=30, eos_token_id=eos)
    drafter = tiny_drafter(target)
    make_oracle(drafter, truth, None)
    with drafter.record_drafts() as records:
        output = greedy(target, prompt, max_new_tokens=30, eos_token_id=eos, assistant_model=drafter)
    assert output.tolist() == expected.tolist()
    assert [r.cut for r in records[0].rounds] == [False] * (len(records[0].rounds) - 1) + [True]


def test_oracle_in_float32_too():
    target = tiny_target(dtype=torch.float32)
    prompt = prompt_of(9)
    truth = greedy(target, prompt, max_new_tokens=60)
    drafter = tiny_drafter(target, 8)
    make_oracle(drafter, truth, 5)
    assert greedy(target, prompt, max_new_tokens=48, assistant_model=drafter).tolist() == truth[:, :57].tolist()


# ------------------------------------------------------------------------------------------------- options


def test_a_random_drafter_changes_nothing(target):
    drafter = tiny_drafter(target)
    for length in (1, 3, 17):
        prompt = prompt_of(length)
        expected = greedy(target, prompt, max_new_tokens=25)
        assert greedy(target, prompt, max_new_tokens=25, assistant_model=drafter).tolist() == expected.tolist()


def test_streamer_gets_exactly_the_tokens(target):
    prompt = prompt_of(6)
    truth = greedy(target, prompt, max_new_tokens=40)
    drafter, streamer = tiny_drafter(target), Collect()
    make_oracle(drafter, truth, 3)
    output = greedy(target, prompt, max_new_tokens=20, assistant_model=drafter, streamer=streamer)
    assert sum(streamer.groups, []) == output[0].tolist()
    assert streamer.ended and len(streamer.groups[2]) == 3


@pytest.mark.parametrize("stop", range(9, 19))
def test_custom_criterion_inside_a_block(target, stop):
    prompt = prompt_of(8)
    truth = greedy(target, prompt, max_new_tokens=40)
    criteria = StoppingCriteriaList([StopAtLength(stop)])
    expected = greedy(target, prompt, max_new_tokens=30, stopping_criteria=criteria)
    drafter = tiny_drafter(target)
    make_oracle(drafter, truth, None)
    output = greedy(target, prompt, max_new_tokens=30, stopping_criteria=criteria, assistant_model=drafter)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["length", "eos"])
def test_a_users_own_length_or_eos_criterion(target, kind):
    prompt = prompt_of(8)
    truth = greedy(target, prompt, max_new_tokens=40)
    criterion = MaxLengthCriteria(14) if kind == "length" else EosTokenCriteria(int(truth[0, 13]))
    options = dict(max_new_tokens=30, stopping_criteria=StoppingCriteriaList([criterion]))
    expected = greedy(target, prompt, **options)
    drafter = tiny_drafter(target, 8)
    make_oracle(drafter, truth, None)
    with drafter.record_drafts() as records:
        assert greedy(target, prompt, **options, assistant_model=drafter).tolist() == expected.tolist()
    assert records[0].rounds[-1].cut


def test_a_criterion_that_reads_scores(target):
    def confident(input_ids, scores, **kwargs):
        done = bool(scores[-1].softmax(-1).max() > 0.5) if scores else False
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool)

    prompt = prompt_of(8)
    options = dict(max_new_tokens=20, output_scores=True, return_dict_in_generate=True)
    options["stopping_criteria"] = StoppingCriteriaList([confident])
    expected = greedy(target, prompt, **options).sequences
    output = greedy(target, prompt, **options, assistant_model=tiny_drafter(target)).sequences
    assert output.tolist() == expected.tolist()


def test_stock_assistants_keep_their_criteria(target):
    """A criterion that cannot be copied, such as one that waits for an event, works as without the hook."""
    event = threading.Event()

    class Cancelled(StoppingCriteria):
        def __init__(self):
            self.event = event

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), self.event.is_set(), dtype=torch.bool)

    prompt = prompt_of(8)
    expected = greedy(target, prompt, max_new_tokens=12)
    criteria = StoppingCriteriaList([Cancelled()])
    for assistant in (tiny_target(seed=3), tiny_drafter(target)):
        event.clear()
        output = greedy(target, prompt, max_new_tokens=12, stopping_criteria=criteria, assistant_model=assistant)
        assert output.tolist() == expected.tolist()
        event.set()
        output = greedy(target, prompt, max_new_tokens=12, stopping_criteria=criteria, assistant_model=assistant)
        assert output.shape[1] < expected.shape[1]


def test_processors_see_each_drafts_own_prefix(target):
    class NoRepeatOfLast(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -1:], float("-inf"))

    prompt = prompt_of(8)
    options = dict(
        max_new_tokens=30,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        logits_processor=LogitsProcessorList([NoRepeatOfLast()]),
    )
    expected = greedy(target, prompt, **options)
    drafter = tiny_drafter(target)
    assert greedy(target, prompt, **options, assistant_model=drafter).tolist() == expected.tolist()
    make_oracle(drafter, expected, 2)
    assert greedy(target, prompt, **options, assistant_model=drafter).tolist() == expected.tolist()


def test_returned_scores_and_states(target):
    prompt = prompt_of(6)
    truth = greedy(target, prompt, max_new_tokens=40)
    wanted = ("scores", "logits", "hidden_states")
    options = dict(max_new_tokens=12, return_dict_in_generate=True, **{f"output_{key}": True for key in wanted})
    expected = greedy(target, prompt, **options)
    drafter = tiny_drafter(target)
    make_oracle(drafter, truth, 3)
    output = greedy(target, prompt, **options, assistant_model=drafter)
    for key in ("scores", "logits"):
        assert len(output[key]) == len(expected[key]) == 12
        torch.testing.assert_close(torch.stack(output[key]), torch.stack(expected[key]), rtol=1e-4, atol=1e-4)
    assert len(output.hidden_states[0]) == len(expected.hidden_states[0])


def test_left_padding_is_no_context(target):
    prompt = prompt_of(6)
    truth = greedy(target, prompt, max_new_tokens=30)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt], dim=1)
    mask = (padded != 0).long()
    drafter = tiny_drafter(target)
    seen = []
    original = drafter.extend_context
    drafter.extend_context = lambda taps, cache: (seen.append(taps[0].shape[1]), original(taps, cache))
    output = greedy(target, padded, attention_mask=mask, max_new_tokens=20, assistant_model=drafter)
    assert output[:, 5:].tolist() == truth[:, :26].tolist()
    assert seen[0] == 6


@pytest.mark.parametrize("filled", [1, 5, 11])
def test_a_half_filled_cache(target, filled):
    prompt, drafter = prompt_of(12), tiny_drafter(target)
    expected = greedy(target, prompt, max_new_tokens=12)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=prompt[:, :filled], use_cache=True, **{CACHE_NAME: cache})
    output = greedy(target, prompt, max_new_tokens=12, assistant_model=drafter, **{CACHE_NAME: cache})
    assert output.tolist() == expected.tolist()


def test_only_the_taps_are_kept_alive(target):
    drafter = tiny_drafter(target)
    kept = []
    original = drafter.make_candidate_generator

    def make(target, **call):
        generator = original(target, **call)
        get = generator.get_candidates

        def look(input_ids, **kwargs):
            if kwargs["model_outputs"] is not None:
                kept.append(sum(state is not None for state in kwargs["model_outputs"].hidden_states))
            return get(input_ids, **kwargs)

        generator.get_candidates = look
        return generator

    drafter.make_candidate_generator = make
    greedy(target, prompt_of(5), max_new_tokens=8, assistant_model=drafter)
    assert set(kept) == {3}


def test_long_blocks_are_not_cut_by_the_stock_default(target):
    prompt = prompt_of(6)
    truth = greedy(target, prompt, max_new_tokens=80)
    drafter = tiny_drafter(target, block_size=32)
    make_oracle(drafter, truth, None)
    with drafter.record_drafts() as records:
        output = greedy(target, prompt, max_new_tokens=64, assistant_model=drafter)
    assert output.tolist() == truth[:, :70].tolist() and records[0].rounds[0].length == 32


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_fewer_drafts_are_a_prefix_of_the_same_block(target, limit):
    prompt = prompt_of(6)
    drafter = tiny_drafter(target)
    drafted = {}
    for where in ("call", "config"):
        drafter.config.num_draft_tokens = limit if where == "config" else None
        options = {"num_assistant_tokens": limit} if where == "call" else {}
        with drafter.record_drafts() as records:
            greedy(target, prompt, max_new_tokens=12, assistant_model=drafter, **options)
        drafted[where] = [r.drafted for r in records[0].rounds]
    assert max(drafted["call"]) == min(limit, 3) and drafted["call"] == drafted["config"]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(hidden_size=32), ("hidden_size", "32", "64")),
        (dict(num_hidden_layers=5), ("target layers", "5", "6")),
        (dict(vocab_size=72), ("vocab_size", "72", "64")),
    ],
)
def test_a_drafter_of_another_target_is_refused_before_work(target, change, words):
    drafter = tiny_drafter(target)
    other = tiny_target(**({"vocab_size": 64} | change))

    def fail(*args, **kwargs):
        raise AssertionError("work was done")

    other.model.forward = fail
    with pytest.raises(ValueError) as error:
        greedy(other, prompt_of(4), max_new_tokens=4, assistant_model=drafter)
    assert all(word in str(error.value) for word in words)


def test_what_cannot_be_accelerated_is_refused_before_work(target):
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match="use_cache"):
        greedy(target, prompt_of(4), use_cache=False, max_new_tokens=4, assistant_model=drafter)
    drafter.train()
    with pytest.raises(ValueError, match="training mode"):
        greedy(target, prompt_of(4), max_new_tokens=4, assistant_model=drafter)


def test_options_that_drafts_would_spoil_are_refused(target):
    drafter, prompt = tiny_drafter(target), prompt_of(6)
    synth = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    for options, message in (
        (dict(guidance_scale=1.5), "guidance_scale is 1.5"),
        (dict(cache_implementation="quantized"), "cache_implementation is 'quantized'"),
        (dict(watermarking_config=synth, do_sample=True), "SynthIDTextWatermarkingConfig"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(input_ids=prompt, max_new_tokens=4, assistant_model=drafter, **options)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=prompt, use_cache=True, **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="cache holds 6 tokens and input_ids only 2 of 8"):
        options = {CACHE_NAME: cache, "attention_mask": torch.ones(1, 8, dtype=torch.long)}
        greedy(target, prompt_of(2), max_new_tokens=4, assistant_model=drafter, **options)
    embeds = target.get_input_embeddings()(prompt)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="attention_mask hides positions of inputs_embeds"):
        target.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=4, assistant_model=drafter)


def test_input_embeddings_instead_of_ids(target):
    drafter, embeds = tiny_drafter(target), target.get_input_embeddings()(prompt_of(6)).detach()
    options = dict(inputs_embeds=embeds, max_new_tokens=20, do_sample=False)
    expected = target.generate(**options)
    with drafter.record_drafts() as records:
        assert target.generate(**options, assistant_model=drafter).tolist() == expected.tolist()
    assert records[0].rounds


def test_beams_stay_transformers_own(target):
    """transformers warns and searches with beams alone; the result is the ordinary one."""
    drafter, prompt = tiny_drafter(target), prompt_of(4)
    expected = greedy(target, prompt, num_beams=2, max_new_tokens=8)
    assert greedy(target, prompt, num_beams=2, max_new_tokens=8, assistant_model=drafter).tolist() == expected.tolist()


def test_a_target_that_cannot_roll_back_is_refused():
    drafter, hybrid = tiny_drafter(tiny_target()), build("Qwen3-Next")
    with pytest.raises(ValueError, match="linear_attention|stateful"):
        greedy(hybrid, prompt_of(4), max_new_tokens=4, assistant_model=drafter)


# ------------------------------------------------------------------------------------------------- hook and records


def test_hook_is_installed_once_and_leaves_others_alone(target):
    before = GenerationMixin._get_candidate_generator
    threads = [threading.Thread(target=install_hook) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert GenerationMixin._get_candidate_generator is before
    prompt = prompt_of(12)
    expected = greedy(target, prompt, max_new_tokens=15).tolist()
    assert greedy(target, prompt, max_new_tokens=15, prompt_lookup_num_tokens=3).tolist() == expected
    assert greedy(target, prompt, max_new_tokens=15, assistant_model=tiny_target(seed=3)).tolist() == expected


def test_attach_works_without_the_patched_class(target):
    drafter, prompt = tiny_drafter(target), prompt_of(6)
    expected = greedy(target, prompt, max_new_tokens=12).tolist()
    uninstall_hook()
    try:
        with pytest.raises(Exception):  # noqa: B017  the stock loop knows nothing of such an assistant
            greedy(target, prompt, max_new_tokens=12, assistant_model=drafter)
        drafter.attach(target)
        with drafter.record_drafts() as records:
            assert greedy(target, prompt, max_new_tokens=12, assistant_model=drafter).tolist() == expected
        assert records[0].rounds
        drafter.detach(target)
        drafter.attach(torch.compile(target))
        assert greedy(target, prompt, max_new_tokens=12, assistant_model=drafter).tolist() == expected
        drafter.detach(torch.compile(target))
        drafter.detach(target)
        assert "_get_candidate_generator" not in target.__dict__
        with pytest.raises(TypeError, match="target is a int"):
            drafter.attach(3)
    finally:
        install_hook()


def test_records_do_not_mix_between_threads(target):
    results = {}

    def work(name, spoiled, runs):
        prompt = prompt_of(6, seed=spoiled)
        truth = greedy(target, prompt, max_new_tokens=40)
        drafter = tiny_drafter(target)
        make_oracle(drafter, truth, spoiled)
        with drafter.record_drafts() as records:
            for _ in range(runs):
                greedy(target, prompt, max_new_tokens=24, assistant_model=drafter)
        results[name] = [set(record.acceptance_lengths) for record in records]

    threads = [threading.Thread(target=work, args=(n, n, 2 + n)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [{n}] * (2 + n) for n in (1, 2, 3)}


def test_native_dflash_path_drafts_the_same(target):
    """transformers' own DFlash loop (5.15 and later), which the forward contract serves too."""
    drafter, prompt = tiny_drafter(target), prompt_of(6)
    expected = greedy(target, prompt, max_new_tokens=16)
    drafts = {}
    for path in (None, "dflash"):
        drafts[path] = []
        handle = drafter.norm.register_forward_hook(lambda module, args, output, d=drafts[path]: d.append(output))
        output = greedy(target, prompt, max_new_tokens=16, assistant_model=drafter, speculation_type=path)
        handle.remove()
        assert output.tolist() == expected.tolist()
    assert len(drafts[None]) >= 8 and abs(len(drafts[None]) - len(drafts["dflash"])) <= 1
    for ours, native in zip(drafts[None], drafts["dflash"], strict=False):
        torch.testing.assert_close(ours, native)


def test_mask_token_may_be_generated(target):
    """A target that emits the mask token as text keeps it."""
    prompt = prompt_of(6)
    truth = greedy(target, prompt, max_new_tokens=20)
    drafter = tiny_drafter(target, mask_token_id=int(truth[0, 9]))
    assert greedy(target, prompt, max_new_tokens=20, assistant_model=drafter).tolist() == truth.tolist()


def test_padded_vocabulary_and_half_precision_drafter(target):
    wide = tiny_target(vocab_size=72, dtype=torch.float32)
    prompt = prompt_of(6)
    expected = greedy(wide, prompt, max_new_tokens=16)
    drafter = DFlareForBlockDiffusion(
        DFlareConfig.from_target(wide.config, num_hidden_layers=2, block_size=4, num_taps=3)
    )
    drafter = drafter.to(torch.bfloat16).eval()
    assert greedy(wide, prompt, max_new_tokens=16, assistant_model=drafter).tolist() == expected.tolist()
