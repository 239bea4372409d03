"""Anchors, labels, weights, and the loss in all its shapes."""

import math

import pytest
import torch
from torch import nn

from dflare.candidates_dflare import request_taps, select_taps
from dflare.drafting_dflare import RestrictedHead
from dflare.training.anchors import IGNORED, anchor_candidates, sample_anchors, slot_labels
from dflare.training.loss import block_loss, gamma_at, position_weights, rows_of, weighted_cross_entropy
from helpers import prompts_of, tiny_drafter, tiny_target

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


def loss_of(pair, ids, mask, taps, anchors, keep, gamma=4.0, head=None, weight_sum=None):
    target, drafter = pair
    head = head or target.get_output_embeddings()
    return block_loss(drafter, target.get_input_embeddings(), head, ids, mask, taps, anchors, keep, gamma, weight_sum)


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
    assert [gamma_at(epoch, 4.5, 1.0) for epoch in (0.0, 0.99, 1.0, 5.5)] == [4.5, 4.5, 5.5, 9.5]
    assert gamma_at(3.0, 4.0, 0.0) == 4.0 and gamma_at(3.0, None, 1.0) is None


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
        loss = loss_of(pair, pieces[0], pieces[1], [t[part] for t in taps], pieces[2], pieces[3], weight_sum=total)
        summed += gradients(pair, loss)
        start += size
    torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-6)


def test_chunks_change_neither_loss_nor_gradient_and_masked_slots_skip_the_head():
    torch.manual_seed(0)
    head, rows = nn.Linear(8, 50, bias=False), []
    head.register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    labels = torch.randint(0, 50, (5, 7))
    labels[1, 3:] = labels[4] = IGNORED
    weights = torch.rand(5, 7)
    results = []
    for chunk in (1000, 4):
        hidden = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = weighted_cross_entropy(hidden, labels, weights, head, chunk)
        loss.backward()
        results.append((loss.detach(), hidden.grad))
        assert sum(rows) in (24, 48) and max(rows) <= chunk
        rows.clear()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    dense = nn.functional.cross_entropy(head(hidden)[labels != IGNORED], labels[labels != IGNORED], reduction="none")
    torch.testing.assert_close((dense * weights[labels != IGNORED]).sum(), results[0][0], rtol=1e-5, atol=1e-5)
    assert not results[0][1][labels == IGNORED].any()


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
    with pytest.raises(ValueError, match="token_ids lacks the labels"):
        rows_of(RestrictedHead(target.get_output_embeddings(), some[1:]), some)
    with pytest.raises(ValueError, match="plain linear head"):
        RestrictedHead(nn.Sequential(nn.Linear(4, 4)), some)
