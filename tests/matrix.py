"""
Options of `generate()` times kinds of target: with a drafter, is the output what it is without? `test_matrix.py` runs the
parts that are quick; all of it, as a table:

    python tests/matrix.py                  every option on every target
    python tests/matrix.py --readme         the table of options for the README
"""

import argparse
import collections
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.utils import logging

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.checks_dflare import CACHE_NAME
from helpers import Collect, make_oracle, prompt_of
from zoo import ROPE_IN_FULL, TARGETS, build

LENGTH, NEW = 9, 24
EXACT, REFUSED, UNSERVED = "same tokens", "refused", "not served without a drafter either"


@dataclass(frozen=True)
class Option:
    """
    One way of calling `generate()`.

    Args:
        arguments: makes the keyword arguments from (target, prompt, truth), where truth is the plain greedy answer.
        refused: part of the one error that this option ends in; None if it is served.
        why: for the README.
    """

    arguments: Callable[..., dict]
    refused: str | None = None
    why: str = ""
    refused_on_some: tuple[str, ...] = ()  # parts of the errors on targets, or releases, that cannot serve it


def plain(**arguments) -> Callable[..., dict]:
    """Arguments that depend on nothing."""
    return lambda target, prompt, truth: dict(arguments)


def stop_at(place: int) -> Callable[..., dict]:
    """A criterion of the user's own, which fires at one token of the answer."""

    def arguments(target, prompt, truth):
        token = int(truth[0, LENGTH + place])
        return {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **kwargs: ids[:, -1] == token])}

    return arguments


def eos_at(*places: int, **more) -> Callable[..., dict]:
    """End-of-sequence tokens that come at these places of the answer."""
    return lambda target, prompt, truth: {"eos_token_id": [int(truth[0, LENGTH + p]) for p in places], **more}


def no_repeat_of_last(ids, scores):
    """A logits processor of the user's own."""
    return scores.scatter(1, ids[:, -1:], float("-inf"))


def neighbours(batch_id, ids):
    """What `prefix_allowed_tokens_fn` allows."""
    return [int(ids[-1] + step) % 64 for step in (1, 3, 7)]


def half_filled(target, prompt, truth) -> dict:
    """A cache that holds the first tokens of the prompt."""
    with torch.no_grad():
        outputs = target(input_ids=prompt[:, :5], use_cache=True)
    return {CACHE_NAME: outputs[CACHE_NAME]}


def left_padded(target, prompt, truth) -> dict:
    """The same prompt behind padding."""
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
    return {"input_ids": padded, "attention_mask": (torch.arange(padded.shape[1]) >= 4).long()[None]}


def embeddings(target, prompt, truth) -> dict:
    """The prompt as embeddings."""
    return {"input_ids": None, "inputs_embeds": target.get_input_embeddings()(prompt).detach()}


RETURNS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True)
DRAFTS_WOULD_SPOIL_IT = "it remembers what it is shown, drafts that are rejected too"

OPTIONS: dict[str, Option] = {
    "no options": Option(plain()),
    "`max_length`": Option(plain(max_length=LENGTH + 6)),
    "`max_new_tokens=1`": Option(plain(max_new_tokens=1)),
    "`min_new_tokens`, `min_length`": Option(eos_at(2, 3, min_new_tokens=9, min_length=LENGTH + 12)),
    "several `eos_token_id`": Option(eos_at(5, 11)),
    "`forced_eos_token_id`": Option(plain(forced_eos_token_id=2)),
    "`exponential_decay_length_penalty`": Option(eos_at(7, exponential_decay_length_penalty=(3, 1.5))),
    "`repetition_penalty`": Option(plain(repetition_penalty=1.5)),
    "`no_repeat_ngram_size`": Option(plain(no_repeat_ngram_size=2)),
    "`encoder_repetition_penalty`": Option(plain(encoder_repetition_penalty=1.5)),
    "`encoder_no_repeat_ngram_size`": Option(plain(encoder_no_repeat_ngram_size=2)),
    "`bad_words_ids`": Option(lambda t, p, truth: {"bad_words_ids": [truth[0, LENGTH + 2 : LENGTH + 4].tolist(), [7]]}),
    "`sequence_bias`": Option(plain(sequence_bias=[[[5], 9.0], [[5, 6], -4.0]])),
    "`suppress_tokens`, `begin_suppress_tokens`": Option(plain(suppress_tokens=[5, 6], begin_suppress_tokens=[9, 10])),
    "`prefix_allowed_tokens_fn`": Option(plain(prefix_allowed_tokens_fn=neighbours)),
    "`watermarking_config` (green list)": Option(lambda t, p, truth: {"watermarking_config": WatermarkingConfig()}),
    "`watermarking_config` (SynthID)": Option(
        lambda t, p, truth: {
            "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3),
            "do_sample": True,
        },
        "SynthIDTextWatermarkingConfig",
        DRAFTS_WOULD_SPOIL_IT,
    ),
    "`guidance_scale`": Option(
        plain(guidance_scale=1.5), "guidance_scale is 1.5", "its processor keeps a cache of its own"
    ),
    "`renormalize_logits`, `remove_invalid_values`": Option(plain(renormalize_logits=True, remove_invalid_values=True)),
    "a logits processor of your own": Option(
        lambda t, p, truth: {"logits_processor": LogitsProcessorList([no_repeat_of_last])}
    ),
    "a stopping criterion of your own": Option(stop_at(6)),
    "`max_time`": Option(plain(max_time=600.0)),
    "a streamer": Option(lambda t, p, truth: {"streamer": Collect()}),
    "scores, logits and hidden states returned": Option(plain(**RETURNS)),
    "`attention_mask` with left padding": Option(left_padded),
    "`inputs_embeds`": Option(embeddings),
    "`inputs_embeds` with hidden positions": Option(
        lambda t, p, truth: embeddings(t, p, truth) | {"attention_mask": (torch.arange(LENGTH) >= 3).long()[None]},
        "attention_mask hides positions of inputs_embeds",
        "transformers' loop loses track of the mask",
    ),
    "a cache that holds part of the prompt": Option(half_filled),
    '`cache_implementation="static"`': Option(
        plain(cache_implementation="static"),
        why="refused for sliding windows, whose static layers cannot be rolled back, and by transformers up to 5.22",
        refused_on_some=("cannot be taken back", "not supported with Static cache"),
    ),
    '`cache_implementation="quantized"`': Option(
        plain(cache_implementation="quantized"),
        "cache_implementation is 'quantized'",
        "it stores other values for tokens that arrive together",
    ),
    "`use_cache=False`": Option(plain(use_cache=False), "use_cache is False", "verification needs the target's cache"),
    "`num_assistant_tokens`": Option(plain(num_assistant_tokens=2)),
    "`assistant_confidence_threshold`": Option(plain(assistant_confidence_threshold=0.05)),
    "`num_beams`": Option(plain(num_beams=2), None, "beam search stays transformers' own, without drafts"),
}


def drafter_for(target) -> DFlareForBlockDiffusion:
    """Two random draft layers in blocks of six."""
    torch.manual_seed(1)
    fields = dict(num_hidden_layers=2, block_size=6, target_layer_ids=[1, 2, 3], mask_token_id=63)
    text = target.config.get_text_config()
    rope = {} if getattr(text, "rope_parameters", None) else ROPE_IN_FULL
    return DFlareForBlockDiffusion(DFlareConfig.from_target(target.config, **fields, **rope)).to(target.dtype).eval()


def outcome(target, option: Option, policy: str = "fixed") -> str:
    """
    `EXACT`, `REFUSED`, `UNSERVED`, or what went wrong, over an oracle that is wrong nowhere, or at one place of each block.
    """
    prompt = prompt_of(LENGTH)
    truth = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=NEW + 8)
    drafter = drafter_for(target)
    drafter.config.draft_policy = policy
    try:
        expected = None if option.refused else run(target, option, prompt, truth)
    except Exception:
        return UNSERVED
    try:
        return against(expected, target, option, drafter, prompt, truth)
    except Exception as error:  # whatever it is, it is this case's outcome
        expected_errors = (*([option.refused] if option.refused else []), *option.refused_on_some)
        if isinstance(error, ValueError) and any(part in str(error) for part in expected_errors):
            return REFUSED
        return f"{type(error).__name__}: {error}"


def against(expected: tuple | None, target, option: Option, drafter, prompt, truth) -> str:
    """The drafter's runs against the ordinary one."""
    for spoiled in (None, 2):
        sequences = truth if expected is None else expected[0]
        make_oracle(drafter, sequences if sequences.shape[1] > LENGTH + 8 else truth, spoiled)
        found = run(target, option, prompt, truth, assistant_model=drafter)
        if option.refused:
            return "not refused"
        if difference := compare(expected, found):
            return difference
    return EXACT


def run(target, option: Option, prompt, truth, **more) -> tuple:
    """The sequences, what a streamer got, and what else was returned."""
    arguments = {"input_ids": prompt, "do_sample": False, **option.arguments(target, prompt, truth), **more}
    if not {"max_length", "max_new_tokens"} & set(arguments):
        arguments["max_new_tokens"] = NEW
    output = target.generate(**{key: value for key, value in arguments.items() if value is not None})
    streamed = arguments["streamer"].tokens if "streamer" in arguments else None
    return (output, streamed, {}) if isinstance(output, torch.Tensor) else (output.sequences, streamed, output)


def compare(expected: tuple, found: tuple) -> str:
    """How two runs differ; empty if they do not."""
    if not torch.equal(expected[0], found[0]):
        return "other tokens"
    if expected[1] != found[1]:
        return "other tokens streamed"
    for key in ("scores", "logits") if expected[2] else ():
        mine, its = (torch.stack(side[2][key]) for side in (found, expected))
        if mine.shape != its.shape or not torch.allclose(mine, its, atol=1e-4) or mine.isnan().any():
            return f"other {key}"
    return ""


def as_promised(option: Option, result: str) -> bool:
    """Whether an outcome is what the table says."""
    allowed = {REFUSED if option.refused else EXACT} | ({REFUSED, UNSERVED} if option.refused_on_some else set())
    return result in allowed


def readme_table() -> str:
    """The options as a Markdown table."""
    rows = ["| with the drafter | outcome |", "| --- | --- |"]
    for name, option in OPTIONS.items():
        result = f"one clear error: {option.why}" if option.refused else EXACT
        rows.append(f"| {name} | {result}{f' ({option.why})' if option.why and not option.refused else ''} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    args = parser.parse_args()
    if args.readme:
        print(readme_table())
        return 0
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(f"\ntransformers {transformers.__version__}\n\n| target | same tokens | refused | not served | wrong |")
    print("| --- | ---: | ---: | ---: | ---: |")
    total: collections.Counter = collections.Counter()
    for name in args.only:
        target, counts, wrong = build(name), collections.Counter(), []
        for label, option in OPTIONS.items():
            result = outcome(target, option)
            if not as_promised(option, result):
                wrong.append(f"{name}: {label}: {result}")
                result = "wrong"
            counts[result] += 1
        total += counts
        row = " | ".join(str(counts[kind]) for kind in (EXACT, REFUSED, UNSERVED, "wrong"))
        print(f"| {name} | {row} |", *wrong, sep="\n", flush=True)
    print(f"\n{total.total()} cases, {total['wrong']} mismatches")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
