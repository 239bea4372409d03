"""The tree keeps its promises: packaging, what goes to the Hub, commands and recipes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from dflare.commands.main import build_parser, main, underscored
from dflare.configuration.arguments import SECTIONS, load_recipe, parse_sources, recipe_file, resolve

ROOT = Path(__file__).parent.parent
BEST = ["--trainer.load_best_model_at_end", "true", "--trainer.metric_for_best_model", "acceptance_length"]
PLAIN = ("learning_rate", "gamma", "gamma_step", "num_anchors", "max_steps")  # kept as they are given
RECIPES = sorted((ROOT / "configuration" / "recipes").rglob("*.yaml"))
HUB_FILES = sorted((ROOT / "modeling_dflare").glob("*_dflare.py"))


def test_every_module_belongs_to_a_listed_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {ROOT / folder for folder in settings["package-dir"].values()}
    assert set(settings["packages"]) == set(settings["package-dir"])
    for top in folders:
        assert {file.parent for file in top.rglob("*.py") if not file.parent.name.startswith("dflare-")} <= folders


@pytest.mark.parametrize("folder", sorted((ROOT / "hub_cards").glob("dflare-*")), ids=lambda folder: folder.name)
def test_released_drafters_carry_the_code_as_it_is(folder):
    assert {file.name for file in folder.glob("*.py")} == {file.name for file in HUB_FILES}
    for file in HUB_FILES:
        assert (folder / file.name).read_text() == file.read_text()


@pytest.mark.parametrize("file", HUB_FILES, ids=lambda file: file.name)
def test_hub_files_import_only_torch_transformers_and_siblings(file):
    allowed = {"torch", "transformers", *sys.stdlib_module_names} - {
        "os",
        "subprocess",
        "socket",
        "pathlib",
        "shutil",
        "urllib",
    }
    siblings = {other.stem for other in HUB_FILES}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 and node.module in siblings
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "exec", "eval", "__import__", "compile")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in SECTIONS)], ids=" ".join)
def test_help_does_not_wait_for_torch(arguments):
    script = (
        f"import sys; sys.argv = ['dflare'] + {arguments!r}\n"
        "from dflare.commands.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: dflare" in done.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_recipes_are_understood(recipe):
    for section in load_recipe(recipe):
        dry = ["--dry_run", *BEST] if section == "train" else []  # which needs no GPU
        namespace, extra = build_parser().parse_known_args([section, "--config", str(recipe), *dry])
        arguments = resolve(SECTIONS[section], section, namespace, extra)
        if section == "data":
            parse_sources(arguments.sources)
        if section == "train":
            from transformers import LlamaConfig

            from dflare import DFlareConfig
            from dflare.commands.train import training_arguments

            settings = training_arguments(arguments)
            assert all(getattr(settings, key) == value for key, value in arguments.trainer.items() if key in PLAIN)
            target = LlamaConfig(num_hidden_layers=36, hidden_size=576, num_attention_heads=9)
            config = DFlareConfig.from_target(target, **arguments.drafter)
            assert config.block_size == arguments.drafter.get("block_size", 16)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("train: {dta: x}", "unknown key 'dta'; did you mean 'data'?"),
        ("trian: {}", "unknown key 'trian'; did you mean 'train'?"),
        ("train: {data: x, output_dir: y, max_length: long}", "max_length: expected int, found 'long'"),
        ("train: {data: x, output_dir: y, target_dtype: int4}", "'int4' is none of"),
        ("[1]", "a recipe is a mapping"),
        ("train: [1]", "train is a mapping"),
        ("train: {data: [}", "not YAML"),
        ("base: nowhere.yaml", "base is 'nowhere.yaml', but"),
        ("base: recipe.yaml", "is based on this recipe"),
        ("train: {data: x, output_dir: y, trainer: {gamma: abc}}", "trainer.gamma is 'abc'"),
        ("train: {data: x, output_dir: y, trainer: {output_dir: z}}", "unknown key 'output_dir'"),
    ],
)
def test_mistyped_recipes_are_errors(recipe, message, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    assert main(["train", "--config", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_says_only_what_differs_from_its_base_and_goes_by_its_name():
    whole, ablation = (load_recipe(recipe_file(name)) for name in ("qwen3-8b", "ablations/dflash"))
    assert ablation["train"]["drafter"] == {
        **whole["train"]["drafter"],
        "fusion": "shared_fc",
        "separate_context_kv": False,
    }
    assert ablation["data"] == whole["data"] and ablation["train"]["trainer"] == whole["train"]["trainer"]
    with pytest.raises(ValueError, match="no recipe of that name; there are ablations/added-fc"):
        recipe_file("qwen3-80b")


def test_a_flag_overrides_the_recipe_and_the_recipe_the_default(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("train: {data: a, output_dir: b, seed: 3, trainer: {learning_rate: 0.1, gamma: 2}}")
    words = [underscored(word) for word in ("--no-dry-run", "--validation-data=a-b", "--prompt", "a-b", "--")]
    assert words == ["--no-dry_run", "--validation_data=a-b", "--prompt", "a-b", "--"]
    words = ["train", "--config", str(file), "--seed", "4", "--trainer.gamma", "null", "--drafter.block_size=8"]
    words += ["--trainer.learning_rate", "1e-3", "--trainer.save_strategy", "no"]
    namespace, extra = build_parser().parse_known_args(words)
    arguments = resolve(SECTIONS["train"], "train", namespace, extra)
    assert (arguments.data, arguments.seed, arguments.max_length) == ("a", 4, 3072)
    assert arguments.trainer == {"learning_rate": 1e-3, "gamma": None, "save_strategy": "no"} and arguments.drafter == {
        "block_size": 8
    }
