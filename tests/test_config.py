"""DFlareConfig: what it derives, what it refuses."""

import pytest
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
)

from dflare import DFlareConfig
from dflare.configuration_dflare import choose_mask_token, spread_taps

BASE = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, num_target_layers=8, block_size=4)
IDS = dict(target_layer_ids=[1, 3], mask_token_id=7)


def test_published_spread():
    assert spread_taps(36, 9) == [1, 5, 9, 13, 17, 21, 25, 29, 33]


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 6, 12, 24, 36])
def test_automatic_taps_fit_any_depth(depth):
    for count in (1, 2, 7, 9):
        ids = spread_taps(depth, count)
        assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < depth - 1 and len(ids) <= count


def test_taps_of_shallow_targets():
    assert [spread_taps(depth, 9) for depth in (2, 3, 5)] == [[0], [0, 1], [0, 1, 2, 3]]
    assert spread_taps(10, 9) == list(range(9)) and spread_taps(12, 9)[0] == 1


def test_a_single_layer_has_no_tap():
    with pytest.raises(ValueError, match="num_target_layers is 1"):
        DFlareConfig.from_target(LlamaConfig(num_hidden_layers=1))


@pytest.mark.parametrize("ids", [[7], [8], [-1, 2], [2, 2], [3, 1], []])
def test_explicit_taps_are_checked(ids):
    with pytest.raises(ValueError, match="target_layer_ids"):
        DFlareConfig(**BASE, mask_token_id=7, target_layer_ids=ids)


def test_ids_at_either_level_are_the_same():
    top = DFlareConfig(**BASE, **IDS)
    inner = DFlareConfig(rope_theta=10000.0, num_target_layers=8, dflash_config={**IDS, "block_size": 4})
    both = DFlareConfig(**BASE, **IDS, dflash_config={**IDS, "block_size": 4, "other": 1})
    for config in (top, inner, both):
        assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, 7, [1, 3])
        written = config.to_diff_dict()
        assert {k: written["dflash_config"][k] for k in ("block_size", *IDS)} == {
            k: written[k] for k in ("block_size", *IDS)
        }
    assert both.to_dict()["dflash_config"]["other"] == 1


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size"])
def test_levels_that_disagree_are_an_error(key):
    other = {"mask_token_id": 9, "target_layer_ids": [1, 4], "block_size": 8}[key]
    with pytest.raises(ValueError, match=f"{key} is .* but .* inside dflash_config"):
        DFlareConfig(**BASE, **IDS, dflash_config={key: other})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_size=1), "block_size holds 1"),
        (dict(block_size=8.0), "block_size holds 8.0"),
        (dict(num_draft_tokens=0), "num_draft_tokens holds 0"),
        (dict(target_layer_ids=[1.5, 2.5]), "target_layer_ids holds 1.5"),
        (dict(num_attention_heads=4, num_key_value_heads=3), "num_attention_heads is 4.*num_key_value_heads 3"),
        (dict(mask_token_id=None), "mask_token_id is missing"),
        (dict(mask_token_id=151936), "mask_token_id is 151936.*151936"),
        (dict(fusion="mean"), "fusion is 'mean'"),
        (dict(num_hidden_layers=2, layer_types=["full_attention"]), "layer_types is .* 2 layers"),
        (dict(num_hidden_layers=1, layer_types=["chunked_attention"]), "layer_types is .*chunked_attention"),
        (dict(rope_parameters=None), "rope_theta is missing"),
        (dict(use_sliding_window=True, sliding_window=3, max_window_layers=0), "sliding_window is 3.*block_size 4"),
    ],
)
def test_bad_values_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        DFlareConfig(**{**BASE, **IDS, **change})


@pytest.mark.parametrize(
    ("name", "fusion", "separate"),
    [("QwenDFlareDraftModel", "layerwise", True), ("DFlashDraftModel", "shared_fc", False)],
)
def test_published_architectures_are_told_apart(name, fusion, separate):
    config = DFlareConfig(**BASE, **IDS, architectures=[name])
    assert (config.fusion, config.separate_context_kv) == (fusion, separate)


TARGETS = {
    "llama": LlamaConfig(num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "qwen3": Qwen3Config(num_hidden_layers=36),
    "gpt-oss": GptOssConfig(num_hidden_layers=24),
    "gemma2": Gemma2Config(num_hidden_layers=8),
    "gemma3": Gemma3TextConfig(num_hidden_layers=12),
    "phi": PhiConfig(num_hidden_layers=8),
    "neox": GPTNeoXConfig(num_hidden_layers=8),
    "qwen2.5-vl": Qwen2_5_VLConfig(),
}


@pytest.mark.parametrize("name", TARGETS)
def test_derived_from_targets_of_every_kind(name, tmp_path):
    target = TARGETS[name]
    text = target.get_text_config()
    config = DFlareConfig.from_target(target, num_hidden_layers=2)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (
        text.hidden_size,
        text.vocab_size,
        text.num_hidden_layers,
    )
    assert config.block_size == 16 and config.rope_parameters["rope_theta"] > 0
    config.save_pretrained(tmp_path)
    again = DFlareConfig.from_pretrained(tmp_path)
    drop = ("transformers_version", "_name_or_path")
    assert {k: v for k, v in again.to_dict().items() if k not in drop} == {
        k: v for k, v in config.to_dict().items() if k not in drop
    }


def test_rope_survives_with_base_scaling_and_partial_factor(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    scaled = DFlareConfig.from_target(LlamaConfig(num_hidden_layers=8, rope_parameters=dict(rope)))
    assert scaled.rope_parameters == rope
    partial = DFlareConfig.from_target(PhiConfig(num_hidden_layers=8))
    assert partial.rope_parameters["partial_rotary_factor"] == 0.5
    partial.save_pretrained(tmp_path)
    assert DFlareConfig.from_pretrained(tmp_path).rope_parameters == partial.rope_parameters


def test_a_target_without_rope_needs_one():
    with pytest.raises(ValueError, match="rope_theta is missing"):
        DFlareConfig.from_target(BloomConfig(n_layer=8))
    config = DFlareConfig.from_target(BloomConfig(n_layer=8), rope_parameters=BASE["rope_parameters"])
    assert config.num_target_layers == 8


class FakeTokenizer:
    all_special_ids = [0, 1]
    chat_template = "<|user|>{{ x }}"

    def __init__(self, size, added):
        self.size = size
        self.added_tokens_decoder = {i: type("Added", (), {"content": text}) for i, text in added.items()}

    def get_vocab(self):
        return {str(i): i for i in range(self.size) if i != 5}  # with a hole, as real vocabularies have


def test_overrides_are_heard_or_refused():
    target = LlamaConfig(num_hidden_layers=8)
    assert DFlareConfig.from_target(target, rope_theta=5e5).rope_parameters["rope_theta"] == 5e5
    with pytest.raises(ValueError, match="num_hiden_layers: no such field"):
        DFlareConfig.from_target(target, num_hiden_layers=3)


def test_a_mask_token_that_text_uses_is_warned_of(caplog):
    import logging

    logging.getLogger("transformers").propagate = True
    DFlareConfig(**BASE, **IDS, eos_token_id=[2, 7])
    assert "mask_token_id is 7, which is also eos_token_id" in caplog.text


def test_values_set_later_are_checked_when_the_model_is_built():
    from dflare import DFlareForBlockDiffusion

    config = DFlareConfig.from_target(LlamaConfig(num_hidden_layers=8, hidden_size=64, num_attention_heads=4))
    config.target_layer_ids = [4, 4]
    with pytest.raises(ValueError, match="target_layer_ids"):
        DFlareForBlockDiffusion(config)


def test_mask_token_is_one_the_target_does_not_use():
    config = LlamaConfig(vocab_size=100, eos_token_id=[2, 99], bos_token_id=1, pad_token_id=98)
    assert choose_mask_token(config) == 97
    assert choose_mask_token(config, FakeTokenizer(90, {})) == 90
    added = {0: "<s>", 3: "<|user|>", 4: "<|unused|>"}
    assert choose_mask_token(config, FakeTokenizer(100, added)) == 4
    assert choose_mask_token(config, FakeTokenizer(100, {0: "<s>", 3: "<|user|>"})) == 97
