"""Sampling with the drafter is the target's own distribution."""

import itertools

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from helpers import ByConfidence, tiny_drafter, tiny_target

VOCABULARY, NEW = 8, 3


@pytest.fixture(scope="module")
def pair():
    """A target whose next token depends mildly on its context, so that random drafts are often accepted."""
    target = tiny_target(vocab_size=VOCABULARY, dtype=torch.float32)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.15)
    target.generation_config.pad_token_id = 0
    return target, tiny_drafter(target)


@torch.no_grad()
def exact_distribution(target, prompt, temperature, top_k, warper=None):
    """Probabilities (8 ** 3,) of all continuations, computed from the target's logits."""
    continuations = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NEW)))
    ids = torch.cat([prompt.expand(len(continuations), -1), continuations], dim=1)
    logits = target(input_ids=ids).logits[:, prompt.shape[1] - 1 : -1] / temperature
    least = logits.topk(top_k, dim=-1).values[..., -1:]
    logits = logits.masked_fill(logits < least, float("-inf"))
    if warper is not None:
        logits = warper(None, logits.flatten(0, 1)).view_as(logits)
    probabilities = logits.softmax(dim=-1)
    return probabilities.gather(2, continuations.unsqueeze(-1)).squeeze(-1).prod(dim=1)


def compare(counts, expected):
    """Pearson's statistic: mean: cells less one; variance: near twice that, more for rare cells; five sigma."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom + (1 / expected).sum().item()) ** 0.5


def check(pair, runs, temperature, top_k, warper=None, **options):
    target, drafter = pair
    prompt = torch.tensor([[3, 5, 4, 7]])
    torch.manual_seed(0)
    counts = torch.zeros(VOCABULARY**NEW)
    with drafter.record_drafts() as records:
        for _ in range(runs):
            output = target.generate(
                input_ids=prompt,
                assistant_model=drafter,
                do_sample=True,
                temperature=temperature,
                top_k=top_k,
                max_new_tokens=NEW + 2,
                **options,
            )
            a, b, c = output[0, 4:7].tolist()
            counts[a * 64 + b * 8 + c] += 1
    expected = exact_distribution(target, prompt, temperature, top_k, warper) * runs
    assert not counts[expected == 0].any(), "a token that the target cannot sample"
    compare(counts[expected > 0], expected[expected > 0])
    accepted = sum(r.accepted for record in records for r in record.rounds)
    drafted = sum(r.drafted for record in records for r in record.rounds)
    return accepted / drafted


def test_distribution_of_three_tokens(pair):
    assert check(pair, 1000, temperature=1.0, top_k=VOCABULARY) > 0.5


def test_distribution_with_temperature_and_top_k(pair):
    assert check(pair, 1000, temperature=0.5, top_k=4) > 0.15


@pytest.mark.parametrize(
    ("options", "warper"),
    [
        (dict(top_p=0.7), TopPLogitsWarper(0.7)),
        (dict(min_p=0.8), MinPLogitsWarper(0.8)),
        (dict(typical_p=0.6), TypicalLogitsWarper(0.6)),
        (dict(epsilon_cutoff=0.12), EpsilonLogitsWarper(0.12)),
        (dict(eta_cutoff=0.9), EtaLogitsWarper(0.9)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_distribution_with_other_warpers(pair, options, warper):
    accepted = check(pair, 600, temperature=1.0, top_k=VOCABULARY, warper=warper, **options)
    assert accepted > 0.02
    everything = exact_distribution(pair[0], torch.tensor([[3, 5, 4, 7]]), 1.0, VOCABULARY, warper)
    assert (everything == 0).sum() > 100, "a warper that cuts nothing tests nothing"


def test_distribution_with_a_draft_vocabulary(pair):
    """Drafts come from half of the tokens; the output from all of them."""
    target, drafter = pair
    drafter.set_draft_vocabulary([1, 3, 4, 6])
    try:
        assert check(pair, 1000, temperature=1.0, top_k=VOCABULARY) > 0.2
    finally:
        drafter.set_draft_vocabulary(None)


def test_distribution_where_confidence_decides(pair, monkeypatch):
    monkeypatch.setattr("dflare.candidates_dflare.policy_for", lambda *args: ByConfidence(0.17))
    assert check(pair, 1500, temperature=1.0, top_k=VOCABULARY) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, VOCABULARY), (0.5, 4)])
def test_distribution_over_20000_runs(pair, temperature, top_k):
    assert check(pair, 20_000, temperature, top_k) > 0.15


def test_a_stopping_criterion_does_not_bias(pair):
    """Where a criterion cuts drafts, the target's own samples are matched: the odds of drafts would favour what is kept."""
    target, drafter = pair
    prompt, runs, stop = torch.tensor([[3, 5, 4, 7]]), 1200, 5

    def at_stop(input_ids, scores, **kwargs):
        return input_ids[:, -1] == stop

    torch.manual_seed(0)
    counts: dict[tuple, float] = {}
    for _ in range(runs):
        output = target.generate(
            input_ids=prompt, assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=NEW,
            stopping_criteria=StoppingCriteriaList([at_stop]),
        )  # fmt: skip
        key = tuple(output[0, 4:].tolist())
        counts[key] = counts.get(key, 0) + 1
    expected: dict[tuple, float] = {}
    everything = itertools.product(range(VOCABULARY), repeat=NEW)
    for tokens, probability in zip(
        everything, exact_distribution(target, prompt, 1.0, VOCABULARY).tolist(), strict=True
    ):
        key = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        expected[key] = expected.get(key, 0.0) + probability * runs
    assert set(counts) <= set(expected)
    compare(torch.tensor([counts.get(key, 0.0) for key in expected]), torch.tensor(list(expected.values())))


def test_drafts_are_scaled_by_the_temperature(pair):
    target, drafter = pair
    seen = {}
    for temperature in (1.0, 2.0):
        original = drafter.make_candidate_generator

        def make(target, original=original, temperature=temperature, **call):
            generator = original(target, **call)
            choose = generator._choose

            def look(input_ids, logits):
                tokens, processed = choose(input_ids, logits)
                seen.setdefault(temperature, (logits.clone(), processed))
                return tokens, processed

            generator._choose = look
            return generator

        drafter.make_candidate_generator = make
        target.generate(
            input_ids=torch.tensor([[3, 5]]),
            assistant_model=drafter,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=8,
        )
        del drafter.make_candidate_generator
    for temperature, (raw, processed) in seen.items():
        torch.testing.assert_close(raw / temperature, processed)
