"""Options times targets: all options on one target, one call on all targets; `matrix.py` runs the whole product."""

import functools
from pathlib import Path

import pytest
import torch

from helpers import prompt_of, prompts_of
from matrix import EXACT, OPTIONS, as_promised, drafter_for, outcome, readme_table
from zoo import REFUSED, TARGETS, build


@pytest.fixture(scope="module")
def llama():
    return build("Llama")


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(llama, name, policy):
    assert as_promised(OPTIONS[name], outcome(llama, OPTIONS[name], policy)), outcome(llama, OPTIONS[name], policy)


@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_target(name):
    assert outcome(build(name), OPTIONS["no options"]) == EXACT


@pytest.mark.parametrize("name", TARGETS)
def test_batches_of_every_kind_of_target(name):
    target = build(name)
    drafter = drafter_for(target)
    ids = prompts_of(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = dict(attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
    ours = target.generate(input_ids=ids, **options, assistant_model=drafter)
    for row in range(3):  # each on its own, since the company moves some targets' ordinary output
        options["attention_mask"] = mask[row : row + 1]
        assert torch.equal(ours[row], target.generate(input_ids=ids[row : row + 1], **options)[0])


def test_the_readme_holds_the_table():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert readme_table() in readme


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_cannot_roll_back_are_refused_before_work(name):
    target = build(name)
    drafter = drafter_for(target)

    @functools.wraps(target.forward)
    def fail(*args, **kwargs):
        raise AssertionError("work was done")

    target.forward = fail
    with pytest.raises(ValueError, match="cannot be rolled back|stateful|cannot be taken back|takes no cache"):
        target.generate(input_ids=prompt_of(5), max_new_tokens=4, assistant_model=drafter)
