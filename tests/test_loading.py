"""Weights and code survive every way of saving and loading."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from dflare import DFlareConfig, DFlareForBlockDiffusion
from dflare.modeling_dflare import fusion_start
from helpers import prompt_of, tiny_drafter, tiny_target

PARTS = ("configuration", "modeling", "candidates", "checks", "drafting", "policy", "batches", "hook", "masks")
CODE = {f"{part}_dflare.py" for part in PARTS}


@pytest.fixture
def drafter():
    return tiny_drafter(tiny_target(dtype=torch.float32))


def fill_with_constants(drafter):
    for number, parameter in enumerate(drafter.parameters(), 1):
        torch.nn.init.constant_(parameter, number / 8)
    return drafter


def from_remote_code(folder):
    """As in a process without the package: the classes of the folder's own files."""
    remote = get_class_from_dynamic_module("modeling_dflare.DFlareForBlockDiffusion", folder)
    assert remote is not DFlareForBlockDiffusion
    return remote.from_pretrained(folder)


LOADERS = {
    "class": DFlareForBlockDiffusion.from_pretrained,
    "auto": AutoModel.from_pretrained,
    "remote code": from_remote_code,
    "device map": lambda folder: DFlareForBlockDiffusion.from_pretrained(folder, device_map="cpu"),
    "bf16": lambda folder: AutoModel.from_pretrained(folder, dtype=torch.bfloat16),
    "bf16 remote code": lambda folder: from_remote_code(folder).to(torch.bfloat16),
}


@pytest.mark.parametrize("way", LOADERS)
def test_every_parameter_survives(drafter, tmp_path, way):
    fill_with_constants(drafter).save_pretrained(tmp_path)
    loaded = LOADERS[way](tmp_path)
    assert not loaded.training
    for number, (key, parameter) in enumerate(loaded.named_parameters(), 1):
        assert bool((parameter == number / 8).all()), key


@pytest.mark.parametrize("fusion", ["layerwise", "shared_fc"])
def test_tensor_names_are_the_published_ones(tmp_path, fusion):
    drafter = tiny_drafter(tiny_target(dtype=torch.float32), fusion=fusion)
    drafter.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    attention += ["k_proj_target", "v_proj_target"] if fusion == "layerwise" else []
    layer = [f"self_attn.{name}" for name in attention] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    expected |= {"hidden_norm.weight", "norm.weight"}
    assert names == expected | {"layer_fusion_weights" if fusion == "layerwise" else "fc.weight"}


def test_a_missing_fusion_matrix_is_reported_and_gets_its_start(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layer_fusion_weights"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = DFlareForBlockDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"layer_fusion_weights"}
    assert torch.equal(loaded.layer_fusion_weights, fusion_start(loaded.config))
    assert torch.equal(loaded.norm.weight, drafter.norm.weight)


def test_start_values_lead_at_the_matching_depth():
    config = DFlareConfig.from_target(tiny_target(num_hidden_layers=24).config, num_hidden_layers=7)
    start = fusion_start(config)
    assert start.argmax(dim=-1).tolist() == [0, 1, 3, 4, 5, 7, 8]
    assert start.max() == 2.0 and start.count_nonzero() == 7
    config.fusion_softmax = False
    torch.testing.assert_close(fusion_start(config), start.softmax(dim=-1))


def test_code_and_auto_map_survive_copies_of_copies(drafter, tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    drafter.save_pretrained(first)
    from_remote_code(first).save_pretrained(second)
    shutil.rmtree(first)
    from_remote_code(second).save_pretrained(third)
    for folder in (second, third):
        assert {file.name for file in folder.glob("*.py")} == CODE
        config = json.loads((folder / "config.json").read_text())
        assert config["auto_map"] == {
            "AutoConfig": "configuration_dflare.DFlareConfig",
            "AutoModel": "modeling_dflare.DFlareForBlockDiffusion",
        }
        assert config["model_type"] == "dflare"
        assert config["architectures"] == ["DFlareForBlockDiffusion"], "an engine would load a DFlashDraftModel wrongly"
        assert config["dflash_config"]["target_layer_ids"] == config["target_layer_ids"] == [1, 2, 3]


FRESH = """
import sys
sys.modules["dflare"] = None  # cannot be imported
import socket
socket.socket.connect = lambda *a: (_ for _ in ()).throw(AssertionError("network"))
import torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained("target")
drafter = AutoModel.from_pretrained("drafter", trust_remote_code=True)
ids = torch.tensor([[5, 9, 11, 4]])
expected = target.generate(ids, do_sample=False, max_new_tokens=12)
with drafter.record_drafts() as records:
    output = target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=drafter)
assert torch.equal(output, expected)
assert records[0].rounds and not [name for name in sys.modules if name.startswith("dflare.")]
print("as ordinary", type(drafter).__module__)
"""


def test_fresh_process_without_the_package(drafter, tmp_path):
    tiny_target(dtype=torch.float32).save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "as ordinary transformers_modules" in done.stdout


def test_two_loaded_copies_serve_each_other(drafter, tmp_path):
    target, prompt = tiny_target(dtype=torch.float32), prompt_of(5)
    drafter.save_pretrained(tmp_path)
    copy = from_remote_code(tmp_path)
    expected = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=8)
    for assistant in (drafter, copy):
        with assistant.record_drafts() as records:
            output = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=8, assistant_model=assistant)
        assert torch.equal(output, expected) and records[0].rounds


def test_an_added_layer_starts_as_the_identity(tmp_path):
    """Built, loaded without it, and saved: the mixture passes it unchanged until it is trained."""
    plain = tiny_drafter(tiny_target())
    plain.save_pretrained(tmp_path / "plain")
    config = DFlareConfig.from_pretrained(tmp_path / "plain", fusion_fc=True)
    added = DFlareForBlockDiffusion.from_pretrained(tmp_path / "plain", config=config)
    taps = [torch.randn(1, 5, 64, dtype=torch.double) for _ in range(3)]
    for ours, theirs in zip(plain.fuse(taps), added.double().fuse(taps), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.nn.init.constant_(added.fc.weight, 0.5)
    added.save_pretrained(tmp_path / "added")
    assert (DFlareForBlockDiffusion.from_pretrained(tmp_path / "added").fc.weight == 0.5).all()
    with pytest.raises(ValueError, match="fusion_fc is True, but fusion is 'shared_fc'"):
        tiny_drafter(tiny_target(), fusion="shared_fc", fusion_fc=True)
