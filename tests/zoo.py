"""One tiny random target of each kind, built from transformers' own classes."""

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
)  # fmt: skip
WINDOW = dict(sliding_window=8)
ROPE_IN_FULL = dict(
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
)  # for a drafter of a target without

# name -> (config class, its own fields)
TARGETS: dict[str, tuple[str, dict]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen2, sliding window": ("Qwen2Config", dict(use_sliding_window=True, max_window_layers=2, **WINDOW)),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "GPT-OSS": ("GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW)),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", WINDOW),
    "Gemma 3": ("Gemma3TextConfig", WINDOW),
    "Mistral, sliding window": ("MistralConfig", WINDOW),
    "Mixtral": ("MixtralConfig", dict(num_local_experts=4)),
    "Phi": ("PhiConfig", dict(num_key_value_heads=4)),
    "Phi-3": ("Phi3Config", dict(num_key_value_heads=4)),
    "Granite": ("GraniteConfig", dict(logits_scaling=3.0, embedding_multiplier=2.0)),
    "OLMo": ("OlmoConfig", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "Cohere": ("CohereConfig", {}),
    "Cohere 2, sliding window": ("Cohere2Config", WINDOW),
    "Llama 4, chunked attention": (
        "Llama4TextConfig",
        dict(attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=96, num_experts_per_tok=1),
    ),
    "SmolLM3": ("SmolLM3Config", dict(no_rope_layer_interval=2)),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "BLOOM": ("BloomConfig", {}),
    "GPT-2": ("GPT2Config", {}),
    "OPT": ("OPTConfig", dict(ffn_dim=96)),
    "Falcon": ("FalconConfig", dict(num_key_value_heads=4, head_dim=None)),
}
# Targets that read images as well: config class, its vision part. Prompts are text or from `image_prompt`.
MULTIMODAL: dict[str, tuple[str, dict]] = {
    "Qwen2.5-VL": ("Qwen2_5_VLConfig", dict(fullatt_block_indexes=[0], window_size=16)),
    "Qwen3-VL": ("Qwen3VLConfig", dict(deepstack_visual_indexes=[0], num_position_embeddings=16)),
}
FLOAT32 = ("Gemma 2", "BLOOM")  # left-padded in float64 they answer NaN
IMAGE, PATCH = 60, 4  # the token that stands for an image's patches, and their side
# Targets that keep a state which cannot be rolled back, or none.
REFUSED: dict[str, tuple[str, dict]] = {
    "Qwen3-Next": (
        "Qwen3NextConfig",
        dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts_per_tok=2),
    ),
    "Mamba": ("MambaConfig", {}),
    "Jamba": ("JambaConfig", dict(num_experts=2, use_mamba_kernels=False)),
    "RecurrentGemma": ("RecurrentGemmaConfig", {}),
    "GPT": ("OpenAIGPTConfig", {}),  # keeps none at all
}


def build(name: str, seed: int = 0):
    """
    The target of that name, in eval mode; runs end at their budget unless a test says otherwise. In float64 rounding cannot
    flip a tie; mixtures of experts have no kernel for it, and those of `FLOAT32` no number, and are float32.
    """
    kind, fields = (TARGETS | REFUSED)[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(
        **{key: value for key, value in {**SIZES, **fields}.items() if value is not None}
    )
    experts = any("experts" in field for field in fields)
    return without_eos(AutoModelForCausalLM, config, torch.float32 if experts or name in FLOAT32 else torch.float64)


def without_eos(kind, config, dtype=torch.float64):
    """A target of random weights, in eval mode, whose runs end at their budget."""
    target = kind.from_config(config).to(dtype).eval()
    target.generation_config.eos_token_id = None
    return target


def build_multimodal(name: str):
    """The multimodal target of that name, in eval mode and float64."""
    kind, fields = MULTIMODAL[name]
    torch.manual_seed(0)
    vision = dict(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=PATCH, out_hidden_size=64, **fields
    )  # fmt: skip
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 3, 3])
    config = getattr(transformers, kind)(
        text_config={**SIZES, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=61, vision_start_token_id=58, vision_end_token_id=59, tie_word_embeddings=False,
    )  # fmt: skip
    return without_eos(AutoModelForImageTextToText, config)


def image_prompt(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A prompt of `length` random tokens (1, length) whose fourth to seventh are an image of four by four patches."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 58, (1, length), generator=generator)
    ids[:, 2:8] = torch.tensor([58, IMAGE, IMAGE, IMAGE, IMAGE, 59])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values": torch.randn(16, 3 * 2 * PATCH**2, generator=generator, dtype=torch.float64),
    }
