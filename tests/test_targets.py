"""Targets that are more than a plain causal model: with images, adapters, compiled, quantised, spread over places."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, pipeline

from helpers import greedy, make_oracle, prompt_of, prompts_of, tiny_drafter, tiny_target
from zoo import MULTIMODAL, build_multimodal, image_prompt

NEW = 24


def same_with_drafter(target, prompt: dict, drafter=None, whole=None, **options) -> list[float]:
    """
    Holds greedy output to what it is without a drafter, for an honest oracle and one that is wrong at each block's second
    draft; returns the acceptance lengths of both.

    Args:
        whole: the model that the drafter is made for, where `target` wraps it.
    """
    drafter = drafter or tiny_drafter(target if whole is None else whole)
    options = dict(max_new_tokens=NEW, do_sample=False, **options)
    expected = target.generate(**prompt, **options)
    truth = target.generate(**prompt, **{**options, "max_new_tokens": NEW + 8})
    lengths = []
    for spoiled in (None, 2):
        make_oracle(drafter, truth, spoiled)
        with drafter.record_drafts() as records:
            assert torch.equal(target.generate(**prompt, **options, assistant_model=drafter), expected)
        lengths.append(records[0].acceptance_length)
    return lengths


# ------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.parametrize("kind", ["text", "image"])
def test_multimodal_targets(name, kind):
    target = build_multimodal(name)
    prompt = image_prompt(14) if kind == "image" else {"input_ids": prompt_of(14, vocab_size=58)}
    assert same_with_drafter(target, prompt) == [4, 2]


@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_image_changes_the_answer(name):
    """So that the test above tells something."""
    target, prompt = build_multimodal(name), image_prompt(14)
    other = {**prompt, "pixel_values": 2 - prompt["pixel_values"]}
    options = dict(max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(target.generate(**prompt, **options), target.generate(**other, **options))


# ------------------------------------------------------------------------------------------------- wrapped and changed


def with_lora(target):
    torch.manual_seed(2)
    config = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
    return get_peft_model(target, config).eval()


def test_a_lora_target():
    plain = greedy(tiny_target(), prompt_of(7), max_new_tokens=NEW)
    target = with_lora(tiny_target())
    prompt = {"input_ids": prompt_of(7)}
    assert not torch.equal(target.generate(**prompt, max_new_tokens=NEW, do_sample=False), plain)
    assert same_with_drafter(target, prompt, whole=tiny_target()) == [4, 2]
    with target.disable_adapter():
        drafter = tiny_drafter(tiny_target())
        ours = target.generate(**prompt, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    assert torch.equal(ours, plain)


def test_a_lora_target_without_the_patched_class():
    target = with_lora(tiny_target())
    drafter = tiny_drafter(tiny_target())
    drafter.attach(target)
    assert same_with_drafter(target, {"input_ids": prompt_of(7)}, drafter) == [4, 2]
    drafter.detach(target)


@pytest.mark.parametrize("how", ["module", "in place", "forward"])
def test_a_compiled_target(how):
    target = tiny_target()
    whole = target
    if how == "module":
        target = torch.compile(target, backend="eager")
    elif how == "in place":
        target.compile(backend="eager")
    else:
        target.forward = torch.compile(target.forward, backend="eager")
    assert same_with_drafter(target, {"input_ids": prompt_of(7)}, whole=whole) == [4, 2]


def test_a_compiled_drafter():
    target = tiny_target()
    drafter = tiny_drafter(target)
    prompt = prompt_of(7)
    expected = greedy(target, prompt, max_new_tokens=NEW)
    drafter.compile(backend="eager", dynamic=True)
    assert torch.equal(greedy(target, prompt, max_new_tokens=NEW, assistant_model=drafter), expected)


class Int4Linear(nn.Module):
    """A linear layer that keeps whole numbers and a scale for each row, as weight-only quantisers put in its place."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 7
        self.register_buffer("quantised", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, states):
        return nn.functional.linear(states, self.quantised * self.scale)


def test_a_quantised_target():
    target = tiny_target()
    drafter = tiny_drafter(target)
    plain = greedy(target, prompt_of(7), max_new_tokens=NEW)
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear):
            target.set_submodule(name, Int4Linear(module))
    assert not torch.equal(greedy(target, prompt_of(7), max_new_tokens=NEW), plain)
    assert same_with_drafter(target, {"input_ids": prompt_of(7)}, drafter) == [4, 2]
    drafter.set_draft_vocabulary(range(20))  # whose rows cannot be picked, so the whole head drafts
    assert same_with_drafter(target, {"input_ids": prompt_of(7)}, drafter) == [4, 2]


# ------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("place", ["split", "offloaded", "on disk"])
def test_a_target_that_accelerate_spread(place, tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    if place == "offloaded":
        cpu_offload(target, execution_device=torch.device("cpu"), offload_buffers=True)
    else:
        parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        layers = {f"model.layers.{i}": "disk" if place == "on disk" and i % 2 else "cpu" for i in range(6)}
        parts |= {"lm_head": "disk"} if place == "on disk" else {}
        dispatch_model(target, {**parts, **layers}, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    lengths = same_with_drafter(target, {"input_ids": prompt_of(7)}, drafter)
    assert lengths == [4, 2] or place == "offloaded"  # which the loop for batches decodes, with drafts of its own
    batch = {"input_ids": prompts_of(2, 7)}
    options = dict(max_new_tokens=12, do_sample=False)
    drafter = tiny_drafter(tiny_target())
    ours = target.generate(**batch, **options, assistant_model=drafter)
    assert torch.equal(ours, target.generate(**batch, **options))


# ------------------------------------------------------------------------------------------------- what else is returned


def test_attentions_and_states_are_those_of_ordinary_decoding():
    target = tiny_target(attn_implementation="eager")
    drafter, prompt = tiny_drafter(target), prompt_of(6)
    wanted = dict(output_attentions=True, output_hidden_states=True, return_dict_in_generate=True)
    expected = greedy(target, prompt, max_new_tokens=12, **wanted)
    make_oracle(drafter, greedy(target, prompt, max_new_tokens=20), 3)
    ours = greedy(target, prompt, max_new_tokens=12, **wanted, assistant_model=drafter)
    assert torch.equal(ours.sequences, expected.sequences)
    for key in ("attentions", "hidden_states"):
        assert len(ours[key]) == len(expected[key]) == 12
        for mine, its in zip(ours[key], expected[key], strict=True):
            for a, b in zip(mine, its, strict=True):
                # transformers' loop hands an attention row out as wide as the pass it came from
                torch.testing.assert_close(a[..., : b.shape[-1]], b, rtol=1e-4, atol=1e-4)
                assert not a[..., b.shape[-1] :].any()


# ------------------------------------------------------------------------------------------------- pipeline


def test_a_pipeline():
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    target = tiny_target()
    drafter = tiny_drafter(target)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")
    fast.padding_side = "left"
    texts = ["w5 w9 w30", "w8 w2 w41 w17 w6"]
    options = dict(max_new_tokens=12, do_sample=False)
    ordinary = pipeline("text-generation", model=target, tokenizer=fast)
    expected = ordinary(texts, **options)
    with drafter.record_drafts() as records:
        assert pipeline("text-generation", model=target, tokenizer=fast, assistant_model=drafter)(texts, **options) == (
            expected
        )
        assert ordinary(texts, **options, assistant_model=drafter) == expected
        assert ordinary(texts, **options, assistant_model=drafter, batch_size=2) == expected
    assert len(records) == 6 and all(record.rounds for record in records)
