"""Anchors, labels, weights, and the loss in all its shapes."""

import math

import pytest
import torch
from torch import nn

from dflare.candidates_dflare import request_taps, select_taps
from dflare.drafting_dflare import RestrictedHead
from dflare.training import loss as loss_module
from dflare.training.anchors import (
    IGNORED,
    anchor_candidates,
    draw_anchors,
    sample_anchors,
    slot_labels,
    token_positions,
)
from dflare.training.data import pack_sequences, pad_sequences
from dflare.training.features import target_states
from dflare.training.loss import Objective, block_hidden_states, block_loss, dense_block_loss, rows_of, slot_losses
from dflare.training.weights import expected_length_weights, gamma_at, position_weights, until_failure
from helpers import prompt_of, prompts_of, tiny_drafter, tiny_target

LENGTH, BLOCK = 20, 4


@pytest.fixture(scope="module")
def pair():
    target = tiny_target(dtype=torch.float32).requires_grad_(False)
    return target, tiny_drafter(target)


def make_batch(pair, rows):
    """Sequences of the given prompt lengths, their states and masks."""
    target, drafter = pair
    ids = prompts_of(len(rows), LENGTH)
    mask = torch.stack([(torch.arange(LENGTH) >= start).long() for start in rows])
    taps = select_taps(target(input_ids=ids, output_hidden_states=request_taps(drafter.config)), drafter.config)
    return ids, mask, taps


def loss_of(pair, ids, mask, taps, anchors, keep, gamma=4.0, head=None, **options):
    target, drafter = pair
    head = head or target.get_output_embeddings()
    embed = target.get_input_embeddings()
    return block_loss(drafter, embed, head, ids, mask, taps, anchors, keep, gamma, **options)


def gradients(pair, loss):
    pair[1].zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in pair[1].parameters()])


def test_labels_are_the_tokens_after_the_anchor():
    ids = torch.arange(100, 110)[None]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1]])
    labels = slot_labels(ids, mask, torch.tensor([[2, 5, 7, 8]]), torch.tensor([[True, True, True, False]]), BLOCK)
    assert labels.tolist() == [[[103, 104, 105], [106, IGNORED, 108], [108, 109, IGNORED], [IGNORED, IGNORED, IGNORED]]]


def test_weights_and_schedules():
    assert position_weights(4, 2.0).tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.0)])
    assert position_weights(4, None).tolist() == [1.0, 1.0, 1.0]
    assert [gamma_at(4.5, 1.0, epoch=epoch) for epoch in (0.0, 0.99, 1.0, 5.5)] == [4.5, 4.5, 5.5, 9.5]
    assert gamma_at(4.0, 0.0, epoch=3.0) == 4.0 and gamma_at(None, 1.0, epoch=3.0) is None
    assert [gamma_at(2.0, 1.0, 6.0, epoch=9.0, progress=p) for p in (0.0, 0.5, 1.0, 1.1)] == [2.0, 4.0, 6.0, 6.0]


def test_anchors_are_generated_tokens_with_a_generated_successor():
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 1])
    assert anchor_candidates(mask).tolist() == [2, 3, 8]
    for mask, count in ((torch.zeros(5), 0), (torch.tensor([0, 0, 1]), 0), (torch.tensor([1]), 0)):
        assert len(anchor_candidates(mask)) == count


def test_up_to_n_distinct_anchors_all_equally_likely():
    mask, generator = torch.ones(11), torch.Generator().manual_seed(0)
    counts = torch.zeros(10)
    for _ in range(2000):
        anchors = sample_anchors(mask, 4, generator)
        assert len(anchors) == 4 and anchors.tolist() == sorted(set(anchors.tolist()))
        counts[anchors] += 1
    assert ((counts - 800).abs() < 5 * (2000 * 0.4 * 0.6) ** 0.5).all()
    assert (
        sample_anchors(mask, 10, generator).tolist()
        == sample_anchors(mask, None, generator).tolist()
        == list(range(10))
    )


def test_rows_without_anchors_give_no_loss_and_defined_gradients(pair):
    ids, mask, taps = make_batch(pair, [4, LENGTH])
    anchors, keep = torch.tensor([[5, 9], [0, 0]]), torch.tensor([[True, True], [False, False]])
    mixed = gradients(pair, loss_of(pair, ids, mask, taps, anchors, keep))
    alone = gradients(pair, loss_of(pair, ids[:1], mask[:1], [t[:1] for t in taps], anchors[:1], keep[:1]))
    torch.testing.assert_close(mixed, alone, rtol=1e-5, atol=1e-6)
    empty = loss_of(pair, ids[1:], mask[1:], [t[1:] for t in taps], anchors[1:], keep[1:])
    assert empty.item() == 0.0 and not gradients(pair, empty).any()


@pytest.mark.parametrize("split", [[8], [2, 2, 2, 2], [1] * 8, [3, 5]])
def test_micro_batches_add_up_to_one_batch(pair, split):
    ids, mask, taps = make_batch(pair, [4, 15, 8, 17, 2, 11, 6, 9])
    anchors = torch.stack(
        [torch.tensor([17, 18]) if start > 15 else torch.tensor([start, 16]) for start in [4, 15, 8, 17, 2, 11, 6, 9]]
    )
    keep = torch.ones_like(anchors, dtype=torch.bool)
    whole = gradients(pair, loss_of(pair, ids, mask, taps, anchors, keep))
    labels = slot_labels(ids, mask, anchors, keep, BLOCK)
    total = ((labels != IGNORED) * position_weights(BLOCK, 4.0)).sum()
    start, summed = 0, torch.zeros_like(whole)
    for size in split:
        part = slice(start, start + size)
        pieces = [t[part] for t in (ids, mask, anchors, keep)]
        loss = loss_of(pair, pieces[0], pieces[1], [t[part] for t in taps], pieces[2], pieces[3], divisor=total)
        summed += gradients(pair, loss)
        start += size
    torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-6)


class Wrapped(nn.Module):
    """A head that is no plain matrix, and counts the rows that it is fed."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.fed = inner, []

    weight = property(lambda self: self.inner.weight)

    def forward(self, states):
        self.fed.append(len(states))
        return self.inner(states)


@pytest.mark.parametrize("at_once", [256, 2])
@pytest.mark.parametrize("kind", ["plain", "bias", "wrapped", "restricted"])
def test_losses_are_the_dense_ones_a_few_rows_at_a_time(monkeypatch, kind, at_once):
    monkeypatch.setattr(loss_module, "ROWS_AT_ONCE", at_once)
    torch.manual_seed(0)
    plain = nn.Linear(8, 50, bias=kind == "bias").requires_grad_(False)
    head = {"wrapped": Wrapped(plain), "restricted": RestrictedHead(plain, torch.arange(50))}.get(kind, plain)
    labels, weights = torch.randint(0, 50, (23,)), torch.rand(23)
    states = torch.randn(23, 8, requires_grad=True)
    losses, hits = slot_losses(states, labels, head)
    (losses * weights).sum().backward()
    ours, states.grad = states.grad, None
    dense = nn.functional.cross_entropy(plain(states), labels, reduction="none")
    (dense * weights).sum().backward()
    torch.testing.assert_close(losses, dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, states.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, plain(states).argmax(dim=-1) == labels)
    if kind == "wrapped":
        assert max(head.fed) == min(at_once, 23)
    assert slot_losses(states[:0], labels[:0], head)[0].shape == (0,)


@pytest.mark.parametrize("gamma", [None, 2.5])
def test_the_block_loss_is_the_dense_reference(pair, gamma):
    ids, mask, taps = make_batch(pair, [4, 15])
    anchors, keep = torch.tensor([[5, 9], [17, 18]]), torch.tensor([[True, True], [True, False]])
    ours = loss_of(pair, ids, mask, taps, anchors, keep, gamma)
    gradient = gradients(pair, ours)
    hidden = block_hidden_states(pair[1], pair[0].get_input_embeddings(), ids, taps, anchors, keep)[:, :, 1:]
    labels = slot_labels(ids, mask, anchors, keep, BLOCK)
    dense = dense_block_loss(hidden, labels, pair[0].get_output_embeddings(), gamma)
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, gradients(pair, dense), rtol=1e-4, atol=1e-6)


def test_masked_slots_never_reach_the_head(pair):
    ids, mask, taps = make_batch(pair, [4, 15])
    anchors, keep = torch.tensor([[5, 9], [17, 18]]), torch.tensor([[True, True], [True, False]])
    head = Wrapped(pair[0].get_output_embeddings())
    loss_of(pair, ids, mask, taps, anchors, keep, head=head)
    assert head.fed == [3 + 3 + 2]


# ------------------------------------------------------------------------------------------------- other objectives


def test_slots_weigh_what_they_add_to_the_expected_length():
    chances = torch.tensor([[0.9, 0.5, 0.2], [0.3, 0.6, 0.7]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    weights = expected_length_weights(-chances.log(), valid, alpha=0.0)
    first = [0.9 + 0.45 + 0.09, 0.45 + 0.09, 0.09]
    torch.testing.assert_close(weights, torch.tensor([first, [0.3 + 0.18, 0.18, 0.0]]))
    # Its weighted gradient is that of the expected length itself, which is what it was derived from.
    logs = chances[:1].log().requires_grad_()
    logs.exp().cumprod(dim=-1).sum().backward()
    torch.testing.assert_close(logs.grad[0], torch.tensor(first))
    assert expected_length_weights(-chances.log(), valid, alpha=1.0).tolist() == [[3.0, 2.0, 1.0], [2.0, 1.0, 0.0]]


def test_slots_after_the_first_failure_do_not_count():
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    assert until_failure(hits, valid).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("objective", [Objective("expected_length"), Objective("until_failure")])
def test_weightings_are_applied_to_the_slots_own_losses(pair, objective):
    ids, mask, taps = make_batch(pair, [4, 15])
    anchors, keep = torch.tensor([[5, 9], [17, 18]]), torch.tensor([[True, True], [True, False]])
    ours = loss_of(pair, ids, mask, taps, anchors, keep, objective=objective)
    hidden = block_hidden_states(pair[1], pair[0].get_input_embeddings(), ids, taps, anchors, keep)[:, :, 1:]
    labels = slot_labels(ids, mask, anchors, keep, BLOCK)
    valid, logits = labels != IGNORED, pair[0].get_output_embeddings()(hidden)
    losses = nn.functional.cross_entropy(logits.transpose(1, -1), labels.transpose(1, -1), reduction="none").transpose(
        1, -1
    )
    if objective.weighting == "expected_length":
        expected = (losses * expected_length_weights(losses, valid, 0.5)).sum() / 3
    else:
        decay = position_weights(BLOCK, 4.0)
        expected = (losses * decay * until_failure(logits.argmax(-1) == labels, valid)).sum() / (decay * valid).sum()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "total_variation"])
def test_distillation_compares_with_what_the_target_says_before_each_label(pair, kind):
    target, drafter = pair
    ids, mask, taps = make_batch(pair, [4, 15])
    anchors, keep = torch.tensor([[5, 9], [17, 18]]), torch.tensor([[True, True], [True, False]])
    states = target.get_decoder()(input_ids=ids).last_hidden_state
    objective = Objective(distillation=kind, share=1.0)
    ours = loss_of(pair, ids, mask, taps, anchors, keep, gamma=None, objective=objective, target_states=states)
    hidden = block_hidden_states(drafter, target.get_input_embeddings(), ids, taps, anchors, keep)[:, :, 1:]
    head, total, count = target.get_output_embeddings(), 0.0, 0
    labels, truth = slot_labels(ids, mask, anchors, keep, BLOCK), target(input_ids=ids).logits.softmax(dim=-1)
    for b, a, k in (labels != IGNORED).nonzero().tolist():
        p, q = truth[b, anchors[b, a] + k], head(hidden[b, a, k]).softmax(dim=-1)
        total += (p * (p / q).log()).sum() if kind == "kl" else (p - q).abs().sum() / 2
        count += 1
    torch.testing.assert_close(ours, total / count, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weighting": "x"}, "weighting is 'x'"),
        ({"distillation": "mse"}, "distillation is 'mse'"),
        ({"share": 1.5}, "share is 1.5"),
    ],
)
def test_bad_objectives_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Objective(**fields)


def test_gradient_checkpointing_changes_nothing(pair):
    ids, mask, taps = make_batch(pair, [4, 6])
    anchors, keep = torch.tensor([[5, 9], [7, 8]]), torch.ones(2, 2, dtype=torch.bool)
    plain = gradients(pair, loss_of(pair, ids, mask, taps, anchors, keep))
    pair[1].train().gradient_checkpointing_enable()
    try:
        checkpointed = gradients(pair, loss_of(pair, ids, mask, taps, anchors, keep))
    finally:
        pair[1].gradient_checkpointing_disable()
        pair[1].eval()
    torch.testing.assert_close(plain, checkpointed)


def test_packed_sequences_are_what_they_are_alone(pair):
    """Loss and gradients of a packed row are those of padded rows; no label, context or position comes from a neighbour."""
    target, drafter = pair
    rows = [
        {
            "input_ids": prompt_of(size, seed=size)[0].tolist(),
            "loss_mask": [0] * start + [1] * (size - start),
            "greedy": 1,
        }
        for size, start in ((9, 1), (20, 5), (3, 3), (6, 2))  # the third holds no anchor
    ]
    results, drawn = [], []
    for collate in (pad_sequences, pack_sequences):
        batch = collate(rows)
        ids, starts = batch["input_ids"], batch["starts"]
        taps = target_states(target, drafter.config, ids, position_ids=token_positions(starts))[:-1]
        anchors, keep = draw_anchors(batch["loss_mask"], starts=starts)
        drawn.append([(int(token), int(place)) for token, place in zip(
            ids.gather(1, anchors)[keep], token_positions(starts).gather(1, anchors)[keep], strict=True
        )])  # fmt: skip
        loss = loss_of(pair, ids, batch["loss_mask"], taps, anchors, keep, starts=starts)
        results.append((loss, gradients(pair, loss)))
    assert drawn[0] == drawn[1] and len(drawn[0]) == 7 + 14 + 3
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    # The neighbours' tokens, one prompt token each, do lie within a block's reach: without `starts` they would be labels.
    spread = slot_labels(ids, batch["loss_mask"], anchors, keep, 8)
    assert (spread != slot_labels(ids, batch["loss_mask"], anchors, keep, 8, starts)).any()


def test_up_to_n_anchors_of_each_packed_sequence():
    mask, starts = torch.ones(1, 30), torch.tensor([0] * 10 + [10] * 4 + [14] * 16)[None]
    anchors, keep = draw_anchors(mask, 5, torch.Generator().manual_seed(0), starts=starts)
    owners = starts.gather(1, anchors)[keep].tolist()
    assert [owners.count(start) for start in (0, 10, 14)] == [5, 3, 5]
    assert not {9, 13, 29} & set(anchors.flatten().tolist())  # the last token of each has no successor
    anchors, keep = draw_anchors(mask, None, None, budget=9, starts=starts)
    assert keep.sum() == 9
    anchors, keep = draw_anchors(mask, 5, torch.Generator().manual_seed(0), budget=2, starts=starts)
    assert keep.sum() == 2  # where one each is too many, some sequences go without


def test_restricted_head(pair):
    target = pair[0]
    ids, mask, taps = make_batch(pair, [4, 6])
    anchors, keep = torch.tensor([[5, 9], [7, 8]]), torch.ones(2, 2, dtype=torch.bool)
    every = RestrictedHead(target.get_output_embeddings(), torch.arange(64))
    whole, same = (loss_of(pair, ids, mask, taps, anchors, keep, head=head) for head in (None, every))
    torch.testing.assert_close(whole, same, rtol=1e-6, atol=1e-6)
    some = ids.unique()
    fewer = loss_of(pair, ids, mask, taps, anchors, keep, head=RestrictedHead(target.get_output_embeddings(), some))
    assert 0 < fewer < whole
    # Labels that it cannot say train nothing: the loss is that of the others.
    labels = slot_labels(ids, mask, anchors, keep, pair[1].config.block_size)
    said = labels.unique()[1::2].contiguous()
    part = RestrictedHead(target.get_output_embeddings(), said)
    hidden = block_hidden_states(pair[1], target.get_input_embeddings(), ids, taps, anchors, keep)[:, :, 1:]
    rows = torch.where(torch.isin(labels, said), torch.searchsorted(said, labels), IGNORED)
    assert (labels != IGNORED).sum() > (rows != IGNORED).sum() > 0
    expected = dense_block_loss(hidden, rows, part, gamma=4.0)
    ours = loss_of(pair, ids, mask, taps, anchors, keep, head=part)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="token_ids lacks the labels"):
        rows_of(RestrictedHead(target.get_output_embeddings(), some[1:]), some)
    with pytest.raises(ValueError, match="plain linear head"):
        RestrictedHead(nn.Sequential(nn.Linear(4, 4)), some)
