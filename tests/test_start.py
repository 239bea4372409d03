"""A drafter that begins as layers of its target."""

import pytest
import torch

import zoo
from dflare.training.start import copy_target_layers
from helpers import tiny_drafter, tiny_target


@pytest.mark.parametrize(("which", "layers"), [("last", [4, 5]), ("spread", [0, 5])])
def test_layers_of_the_target_are_copied(which, layers):
    target = tiny_target()
    drafter = tiny_drafter(target)
    assert copy_target_layers(drafter, target, which) == layers
    for layer, number in zip(drafter.layers, layers, strict=True):
        theirs = target.model.layers[number].state_dict()
        for name, tensor in layer.state_dict().items():
            source = theirs.get(name.replace("_proj_target.", "_proj."))
            assert "q_norm" in name or "k_norm" in name or torch.equal(tensor, source)


def test_heads_are_repeated_for_a_drafter_with_more_of_them():
    """The copied attention gives what the target's own does: query heads meet the key heads that they met there."""
    target = tiny_target()
    wide = tiny_drafter(target, num_key_value_heads=4)
    copy_target_layers(wide, target, "last")
    own, theirs = wide.layers[0].self_attn.k_proj_target.weight, target.model.layers[4].self_attn.k_proj.weight
    assert torch.equal(own.unflatten(0, (4, 16)), theirs.unflatten(0, (2, 16))[[0, 0, 1, 1]])


def test_what_does_not_fit_is_said():
    target = tiny_target()
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight has the shape \(96, 64\), the drafter's \(32, 64\)"):
        copy_target_layers(tiny_drafter(target, intermediate_size=32), target, "last")
    with pytest.raises(ValueError, match="head_dim is 16 in the target, 32 in the drafter"):
        copy_target_layers(tiny_drafter(target, head_dim=32), target, "last")
    with pytest.raises(ValueError, match="start_layers is 'last' for 7 draft layers of 6 target layers"):
        copy_target_layers(tiny_drafter(target, num_hidden_layers=7), target, "last")


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral, sliding window", "SmolLM3"])
def test_targets_of_the_same_build_are_copied(name):
    target = zoo.build(name).float()
    drafter = tiny_drafter(target)
    copy_target_layers(drafter, target, "last")
    theirs = target.model.layers[-1].mlp.down_proj.weight
    assert torch.equal(drafter.layers[-1].mlp.down_proj.weight, theirs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Gemma", "hidden_act is 'gelu_pytorch_tanh' in the target, 'silu' in the drafter"),
        ("Gemma 2", "hidden_act is"),
        ("Qwen2", "it has self_attn.k_proj.bias, self_attn.q_proj.bias, self_attn.v_proj.bias"),
        ("Qwen3-MoE", "it lacks mlp.down_proj.weight"),
        ("Phi-3", "it lacks mlp.gate_proj.weight"),
        ("OLMo", "it lacks input_layernorm.weight"),
        ("Cohere", "it lacks post_attention_layernorm.weight"),
        ("GPT-NeoX", "hidden_act is 'gelu'"),
        ("Falcon", "of 0 target layers that are named so"),
    ],
)
def test_targets_of_another_build_are_refused(name, message):
    target = zoo.build(name).float()
    with pytest.raises(ValueError, match="start_layers") as error:
        copy_target_layers(tiny_drafter(target, **zoo.ROPE_IN_FULL), target, "last")
    assert message in str(error.value)


def test_a_norm_that_adds_one_is_another_norm():
    """Gemma's kind, in a target that is otherwise built as ours."""
    target = zoo.build("Gemma").float()
    target.config.hidden_activation = target.config.hidden_act = "silu"
    with pytest.raises(ValueError, match="it has input_layernorm, which computes something else"):
        copy_target_layers(tiny_drafter(target), target, "last")
