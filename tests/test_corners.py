"""Odd calls that ordinary decoding serves: the same tokens, or one clear error before any work."""

import sys
import threading

import pytest
import torch
from peft import CPTConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM as Causal
from transformers import DynamicCache, GPT2Config, GPTNeoConfig, LlamaConfig, LogitsProcessorList, StoppingCriteriaList

from dflare.checks_dflare import CACHE_NAME, VIRTUAL_TOKENS
from dflare.policy_dflare import AdaptivePolicy, PairStatistics
from helpers import both, greedy, make_oracle, prompt_of, prompts_of, tiny_drafter, tiny_target
from matrix import drafter_for
from zoo import SIZES, build, build_multimodal, image_prompt, without_eos


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return tiny_drafter(target, block_size=6)


def made(config):
    torch.manual_seed(0)
    return without_eos(Causal, config)


# ------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("count", [1, 2])
def test_rope_that_changes_while_decoding(kind, count):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 16}
    target = made(LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=rope))
    drafter = tiny_drafter(target)
    assert torch.equal(*both(target, drafter, prompts_of(count, 9), max_new_tokens=7))
    with pytest.raises(ValueError, match=f"max_length is 34 .* of type '{kind}' changes beyond 16"):
        both(target, drafter, prompts_of(count, 9), max_new_tokens=25)
    if kind == "longrope":
        assert torch.equal(*both(target, drafter, prompts_of(count, length=20), max_new_tokens=12))


@pytest.mark.parametrize(
    "name",
    ["Mistral, sliding window", "Qwen2, sliding window", "Cohere 2, sliding window", "Llama 4, chunked attention"],
)
def test_batches_of_windows_in_a_cache_of_the_users(name, oracle):
    target, ids = build(name), prompts_of(4, 9)
    oracle(greedy(target, ids, max_new_tokens=40))
    caches = [{CACHE_NAME: DynamicCache()} for _ in range(2)]
    expected = greedy(target, ids, max_new_tokens=25, **caches[0])
    assert torch.equal(
        greedy(target, ids, max_new_tokens=25, **caches[1], assistant_model=drafter_for(target)), expected
    )


def test_batches_of_local_attention(oracle):
    sizes = {key: value for key, value in SIZES.items() if "layers" not in key and "heads" not in key}
    layers = dict(num_layers=6, num_heads=4, attention_types=[[["global", "local"], 3]], window_size=8)
    target, ids = made(GPTNeoConfig(**sizes, **layers)), prompts_of(4, 9)
    oracle(greedy(target, ids, max_new_tokens=40))
    assert torch.equal(*both(target, drafter_for(target), ids, max_new_tokens=25))


def test_learned_positions_that_end_with_the_budget(oracle):
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    target, ids = made(GPT2Config(**sizes, n_positions=29)), prompts_of(4, 9)
    oracle(greedy(target, ids, max_length=29))
    assert torch.equal(*both(target, drafter_for(target), ids, max_length=29))


@pytest.mark.parametrize("count", [1, 3])
def test_adapters_with_virtual_tokens(count):
    prefixed = get_peft_model(tiny_target(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    drafter, ids = tiny_drafter(tiny_target()), prompts_of(count, 9)
    if "PREFIX_TUNING" in VIRTUAL_TOKENS:
        with pytest.raises(ValueError, match="the target's adapter is PREFIX_TUNING"):
            both(prefixed, drafter, ids, max_new_tokens=12)
    else:
        assert torch.equal(*both(prefixed, drafter, ids, max_new_tokens=12))
    tokens = dict(cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3])
    with pytest.raises(ValueError, match="the target's adapter is CPT"):
        both(get_peft_model(tiny_target(), CPTConfig(task_type="CAUSAL_LM", **tokens)).eval(), drafter, ids)


def test_adapters_that_a_phrase_switches_on(drafter):
    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    with pytest.raises(ValueError, match=r"alora_invocation_tokens \[5, 6\]"):
        both(get_peft_model(tiny_target(), adapter).eval(), drafter, prompt_of(9))


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen3-VL"])
@pytest.mark.parametrize("count", [3, 4])
def test_batches_of_multimodal_targets(name, count):
    target = build_multimodal(name)
    drafter = drafter_for(target)
    assert torch.equal(*both(target, drafter, prompts_of(count, 14, 58), max_new_tokens=10))
    prompt = image_prompt(14)
    batch = {key: torch.cat([value] * count) for key, value in prompt.items()}
    with pytest.raises(ValueError, match=f"cannot be cut into {count} sequences"):
        target.generate(**batch, max_new_tokens=4, assistant_model=drafter)


# ------------------------------------------------------------------------------------------------- inputs and options


def test_batches_padded_on_the_right(target, drafter):
    ids, mask = prompts_of(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, 5:] = 0
    assert torch.equal(*both(target, drafter, ids * mask, attention_mask=mask, max_new_tokens=12))


ANSWERS = [[5, 6, 7, 2], [5, 8, 9, 10, 2], [30, 31, 2], [40, 2]]


def trie(batch_id: int, ids: torch.Tensor) -> list[int]:
    """What may follow; nothing may behind an answer's end, where ordinary decoding never asks."""
    given = ids[9:].tolist()
    return sorted({a[len(given)] for a in ANSWERS if a[: len(given)] == given and len(a) > len(given)})


@pytest.mark.parametrize("count", [1, 3])
def test_a_trie_is_not_asked_behind_its_ends(target, drafter, count):
    options = dict(eos_token_id=2, prefix_allowed_tokens_fn=trie, max_new_tokens=20)
    ours = greedy(target, prompts_of(count, 9), pad_token_id=0, **options, assistant_model=drafter)
    for row in range(count):  # alone: of rows that have ended ordinary decoding asks on
        expected = greedy(target, prompts_of(count, 9)[row : row + 1], **options)[0]
        assert torch.equal(ours[row, : len(expected)], expected) and not ours[row, len(expected) :].any()
    for seed in range(10):
        torch.manual_seed(seed)
        output = target.generate(
            prompts_of(count, 9), do_sample=True, assistant_model=drafter, pad_token_id=0, **options
        )
        assert all([token for token in row if token] in ANSWERS for row in output[:, 9:].tolist())


def test_an_honest_draft_reaches_a_tries_end(target, drafter):
    options = dict(eos_token_id=2, prefix_allowed_tokens_fn=trie, max_new_tokens=20)
    expected = greedy(target, prompt_of(9), **options)
    make_oracle(drafter, expected, None)
    assert torch.equal(greedy(target, prompt_of(9), **options, assistant_model=drafter), expected)


def test_several_answers_know_their_prompt(target, drafter):
    options = dict(num_return_sequences=3, max_new_tokens=8, pad_token_id=0, do_sample=True)
    seen: dict[str, set] = {"ordinary": set(), "ours": set()}
    for name, assistant in (("ordinary", None), ("ours", drafter)):

        def allowed(batch_id, ids, name=name):
            seen[name].add((batch_id, tuple(ids[:9].tolist())))
            return [5, 6, 7]

        target.generate(prompts_of(2, 9), prefix_allowed_tokens_fn=allowed, assistant_model=assistant, **options)
    assert seen["ours"] == seen["ordinary"]
    options |= dict(top_k=1, encoder_repetition_penalty=0.4)
    ours = target.generate(prompts_of(2, 9), **options, assistant_model=drafter)
    options["num_return_sequences"] = 1
    for place, row in enumerate(ours):  # alone: some releases mix prompts up
        assert torch.equal(target.generate(prompts_of(2, 9)[place // 3 :][:1], **options)[0], row)


@pytest.mark.parametrize("count", [1, 2])
def test_a_criterion_that_answers_with_a_bool(target, drafter, count):
    criteria = StoppingCriteriaList([lambda ids, scores, **kwargs: ids.shape[1] > 12])
    assert torch.equal(*both(target, drafter, prompts_of(count, 9), max_new_tokens=20, stopping_criteria=criteria))


@pytest.mark.parametrize("count", [1, 2])
def test_processors_may_leave_nothing_of_a_draft_vocabulary(target, drafter, count):
    drafter.set_draft_vocabulary([3, 4, 9, 50])
    options = dict(suppress_tokens=[3, 4, 9, 50], max_new_tokens=12)
    assert torch.equal(*both(target, drafter, prompts_of(count, 9), **options))
    output = target.generate(prompts_of(count, 9), do_sample=True, **options, assistant_model=drafter)
    assert not set(output[:, 9:].flatten().tolist()) & {3, 4, 9, 50}


class Slotted:
    """A processor without a `__dict__`."""

    __slots__ = ()

    def __call__(self, ids, scores):
        return scores.scatter(1, ids[:, -1:], float("-inf"))


@pytest.mark.parametrize("count", [1, 2])
def test_a_processor_with_slots(target, drafter, count):
    options = dict(logits_processor=LogitsProcessorList([Slotted()]), max_new_tokens=12)
    assert torch.equal(*both(target, drafter, prompts_of(count, 9), **options))


@pytest.mark.parametrize("count", [1, 2])
def test_ids_of_32_bits(target, drafter, count):
    assert torch.equal(*both(target, drafter, prompts_of(count, 9).int(), max_new_tokens=12))
    output = target.generate(prompts_of(count, 9).int(), do_sample=True, max_new_tokens=12, assistant_model=drafter)
    assert output.shape == (count, 21)


def test_attentions_that_are_not_there_are_refused(target, drafter):
    with pytest.raises(ValueError, match="output_attentions is True, but the target's attn_implementation is 'sdpa'"):
        both(target, drafter, prompt_of(5), output_attentions=True, return_dict_in_generate=True)


# ------------------------------------------------------------------------------------------------- records and threads


def test_records_of_a_batch_add_up(target, drafter, oracle):
    ids = prompts_of(4, 9)
    truth = greedy(target, ids, max_new_tokens=40)
    oracle(truth)
    stops = [int(truth[0, 14]), int(truth[2, 20])]
    with drafter.record_drafts() as records:
        output = greedy(target, ids, max_new_tokens=20, eos_token_id=stops, pad_token_id=0, assistant_model=drafter)
    for row, record in zip(output[:, 9:].tolist(), records, strict=True):
        ends = [place for place, token in enumerate(row) if token in stops]
        added = ends[0] + 1 if ends else len(row)
        assert sum(r.length for r in record.rounds) + record.plain_steps == added - 1
        assert [r.cut for r in record.rounds[:-1]] == [False] * (len(record.rounds) - 1)


def test_threads_may_share_what_is_known():
    known, errors = PairStatistics(), []
    interval = sys.getswitchinterval()

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        policy = AdaptivePolicy(known, wants_confidences=True)
        try:
            for _ in range(400):
                policy.begin_round()
                drafts = policy.choose(int(torch.randint(1, 30, (), generator=generator)), None)
                policy.end_round(drafts, [0])
        except Exception as error:
            errors.append(error)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
