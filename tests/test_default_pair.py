"""The embedded pair: the real target, and the drafter that ships with the repository."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from dflare.commands.generate import encode
from dflare.configuration.arguments import DEFAULT_DRAFTER, DEFAULT_TARGET
from dflare.configuration.targets import resolve_drafter, resolve_target

PROMPTS = [
    "Write a Python function that reverses a linked list.",
    "What is the capital of Australia, and why is it not Sydney?",
    "A train travels 60 miles in 1.5 hours. What is its speed?",
]


@pytest.fixture(scope="module")
def pair():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    folder = resolve_target(DEFAULT_TARGET)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = AutoModel.from_pretrained(resolve_drafter(DEFAULT_DRAFTER), dtype=torch.float32)
    drafter.config.draft_policy = "fixed"  # so that there are drafts to judge, however busy the machine
    yield target, drafter, AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(threads)


def both(pair, prompt, **options):
    target, drafter, tokenizer = pair
    inputs = encode(prompt, tokenizer)
    expected = target.generate(**inputs, do_sample=False, **options)
    with drafter.record_drafts() as records:
        output = target.generate(**inputs, do_sample=False, assistant_model=drafter, **options)
    return expected[0].tolist(), output[0].tolist(), records[0]


def test_same_text_and_drafts_are_accepted(pair):
    expected, output, record = both(pair, PROMPTS[0], max_new_tokens=40)
    assert output == expected
    assert record.acceptance_length > 1.3


def test_the_default_policy_changes_no_token(pair):
    try:
        pair[1].config.draft_policy = "adaptive"
        for prompt in PROMPTS:
            expected, output, _ = both(pair, prompt, max_new_tokens=40)
            assert output == expected
    finally:
        pair[1].config.draft_policy = "fixed"


def test_a_stop_string_in_the_middle_of_a_block(pair):
    target, drafter, tokenizer = pair
    expected, output, _ = both(pair, PROMPTS[0], max_new_tokens=60, stop_strings=["def "], tokenizer=tokenizer)
    assert output == expected
    assert "def " in tokenizer.decode(output[-2:])  # the last token may hold more than the stop string's end


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_long_answers(pair, prompt):
    expected, output, record = both(pair, prompt, max_new_tokens=200)
    assert output == expected
    assert record.acceptance_length > 1.3


def test_the_shipped_weights_are_small_and_in_bfloat16(pair):
    (file,) = Path(resolve_drafter(DEFAULT_DRAFTER)).glob("*.safetensors")
    assert file.stat().st_size < 25_000_000
    with safe_open(file, "pt") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert dtypes.pop("draft_token_ids") == "I64"
    assert set(dtypes.values()) == {"BF16"}
    assert not any("embed" in name or "head" in name for name in dtypes)
