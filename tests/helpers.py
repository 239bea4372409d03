"""Tiny pairs that make faults cheap: a random dense target, a drafter for it, and an oracle that drafts the truth."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.streamers import BaseStreamer

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.candidates_dflare import DFlareCandidateGenerator
from dflare.policy_dflare import FixedPolicy
from dflare.training.store import SCHEMA

GOLDEN = Path(__file__).parent / "golden"
WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def word_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """`WORDS` for tokens 4 to 63."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", bos_token="<s>", chat_template=template
    )


def tiny_target(vocab_size: int = 64, dtype=torch.float64, seed: int = 0, **overrides) -> LlamaForCausalLM:
    """Six random layers of width 64. In float64 rounding cannot flip a tie, so greedy outputs can be compared."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2
    )
    config = LlamaConfig(
        vocab_size=vocab_size,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
        **{**sizes, **overrides},
    )
    target = LlamaForCausalLM(config).to(dtype).eval()
    target.generation_config.eos_token_id = None  # runs end at their budget unless a test says otherwise
    return target


def tiny_drafter(target, block_size: int = 4, seed: int = 1, **overrides) -> DFlareForBlockDiffusion:
    """Two random draft layers on taps 1, 2, 3 of `target`, in its dtype."""
    torch.manual_seed(seed)
    fields = (
        dict(num_hidden_layers=2, block_size=block_size, target_layer_ids=[1, 2, 3], draft_policy="fixed") | overrides
    )
    config = DFlareConfig.from_target(target.config, **fields)
    return DFlareForBlockDiffusion(config).to(target.dtype).eval()


class ByConfidence(FixedPolicy):
    """Verifies the drafts before the first that is less likely, as the adaptive policy may; of a batch, of its last row."""

    wants_confidences = True

    def __init__(self, least: float):
        self.least = least

    def choose(self, limit, confidences=None):
        return next((place for place, confidence in enumerate(confidences[-1]) if confidence < self.least), limit)


class OracleGenerator(DFlareCandidateGenerator):
    """Drafts as usual, then says the true continuation instead, wrong at block position `spoiled` (1 is the first)."""

    truth: torch.Tensor
    spoiled: int | None

    def _choose(self, input_ids, logits):
        count, length = logits.shape[1], input_ids.shape[1]
        tokens = self.truth[:, length : length + count].clone()
        tokens = torch.nn.functional.pad(tokens, (0, count - tokens.shape[1]))
        if self.spoiled is not None and self.spoiled <= count:
            place = self.spoiled - 1
            tokens[:, place] = (tokens[:, place] + 1) % logits.shape[-1]
        return tokens, logits


def make_oracle(drafter: DFlareForBlockDiffusion, truth: torch.Tensor, spoiled: int | None) -> None:
    """Turns `drafter` into an oracle for the sequence `truth` (1, length), prompt included."""

    def make(target, **call):
        generator = OracleGenerator(drafter, target, **call)
        generator.truth, generator.spoiled = truth, spoiled
        return generator

    drafter.make_candidate_generator = make


class Collect(BaseStreamer):
    """Remembers what it is given, in the groups it came in."""

    def __init__(self):
        self.groups: list[list[int]] = []
        self.ended = False

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return sum(self.groups, [])

    def put(self, value):
        self.groups.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def prompt_of(length: int, vocab_size: int = 64, seed: int = 0) -> torch.Tensor:
    """Random prompt ids (1, length), none of them special."""
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def prompts_of(rows: int, length: int, vocab_size: int = 64) -> torch.Tensor:
    """Different random prompts (rows, length)."""
    return torch.cat([prompt_of(length, vocab_size, seed=row) for row in range(rows)])


def greedy(target, input_ids, **options):
    """A greedy call; without `assistant_model` ordinary decoding."""
    return target.generate(input_ids=input_ids, do_sample=False, **options)


def response_rows(target, count=24, length=40):
    """Responses of the tiny target to random prompts."""
    rows = []
    for i in range(count):
        prompt = torch.randint(3, 64, (1, 4 + i % 3), generator=torch.Generator().manual_seed(i))
        response = greedy(target, prompt, max_new_tokens=length, eos_token_id=None)[0, prompt.shape[1] :]
        rows.append(
            dict(zip(SCHEMA.names, (f"r{i}", prompt[0].tolist(), response.tolist(), 0.0, "length"), strict=True))
        )
    return rows


# ------------------------------------------------------------------------------------------------- trainer


def both(target, drafter, batch, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy output of ids or of a batch's inputs, without and with the drafter."""
    inputs, options = batch if isinstance(batch, dict) else {"input_ids": batch}, {"pad_token_id": 0, **options}
    return greedy(target, **inputs, **options), greedy(target, **inputs, **options, assistant_model=drafter)


def golden_target(kind: str) -> Qwen3ForCausalLM:
    """The target of a golden pair."""
    from safetensors.torch import load_file

    target = Qwen3ForCausalLM(Qwen3Config.from_json_file(str(GOLDEN / f"{kind}_tiny" / "target_config.json")))
    target.load_state_dict(load_file(GOLDEN / f"{kind}_tiny" / "target.safetensors"))
    return target.eval().requires_grad_(False)
