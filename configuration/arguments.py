"""
What each subcommand can be told, as typed fields; nothing here imports torch. A value comes from, in rising order: the
field's default, the recipe's section named after the subcommand, a flag.
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import typing
import zlib
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_DRAFTER = "dflare-smollm2-135m"
RECIPES = Path(__file__).parent / "recipes"
START_LAYERS = ("last", "spread")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def setting(help: str, default=dataclasses.MISSING, choices: tuple | None = None, least: float | None = None):
    """
    A field with its help text; a dict default makes a group whose keys are given as `--group.key value`.

    Args:
        choices: the values it may have. least: the smallest number it may be.
    """
    metadata = {"help": help, "choices": choices, "least": least}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class GenerateArguments:
    """Answer a prompt with a target and its drafter, and with --compare without it too."""

    prompt: str = setting("What to ask.", "Write a Python function that checks whether a number is prime.")
    target: str = setting(f"Hub id or folder of the target; {DEFAULT_TARGET} is the embedded one.", DEFAULT_TARGET)
    drafter: str = setting(f"Hub id or folder of the drafter; {DEFAULT_DRAFTER} is the embedded one.", DEFAULT_DRAFTER)
    max_new_tokens: int = setting("Tokens to generate at most.", 128, least=1)
    temperature: float = setting("0 for greedy decoding.", 0.0, least=0)
    dtype: str = setting("Type of target and drafter.", "float32", DTYPES)
    num_assistant_tokens: int | None = setting("Drafts to verify per round at most.", None, least=0)
    compare: bool = setting(
        "Decode ordinarily too, compare, and fail if greedy tokens differ (in bf16, near-ties can make them).", False
    )
    repeats: int = setting("With compare: timed runs of each; the table shows their medians.", 3, least=1)
    seed: int = setting("For sampling.", 0)


@dataclass(kw_only=True)
class CheckArguments:
    """Say whether target and drafter belong together, whether output stays identical, and how much faster it is here."""

    target: str = setting(f"Hub id or folder of the target; {DEFAULT_TARGET} is the embedded one.", DEFAULT_TARGET)
    drafter: str = setting(f"Hub id or folder of the drafter; {DEFAULT_DRAFTER} is the embedded one.", DEFAULT_DRAFTER)
    prompts: list[str] = setting(
        "What to ask.",
        [
            "Write a Python function that checks whether a number is prime.",
            "A train covers 120 km in 1.5 hours. What is its speed? Explain step by step.",
            "Write a short story about a lighthouse keeper.",
        ],
    )
    max_new_tokens: int = setting("Tokens to generate for each prompt.", 96, least=1)
    dtype: str = setting("Type of target and drafter.", "float32", DTYPES)


@dataclass(kw_only=True)
class Source:
    """A dataset with prompts: on the Hub, or a JSONL or parquet file; an entry of `sources` in a recipe."""

    path: str = setting("Hub id, folder or file.")
    subset: str | None = setting("Configuration of the dataset.", None)
    split: str = setting("Split of the dataset.", "train")
    revision: str | None = setting("Commit or tag on the Hub.", None)
    columns: list[str] = setting(
        "Columns with the user's text, turns or messages; texts of several are joined.", ["turns"]
    )
    format: str = setting(
        "What a conversation's first turn is put into, at the first {}; benchmarks are compared with what it is without.",
        "{}",
    )
    share: float | None = setting("Weight in the mixture; by default every row is taken.", None, least=1e-9)
    name: str | None = setting(
        "What its rows' ids begin with; by default the last part of the path, and the split.", None
    )

    @property
    def title(self) -> str:
        """What its rows' ids begin with; rows in another format are other rows."""
        own = "-".join([Path(self.path).stem, *filter(None, [self.subset]), self.split])
        mark = "" if self.format == "{}" else f"@{zlib.crc32(self.format.encode()):08x}"
        return (self.name or own) + mark


@dataclass(kw_only=True)
class DataArguments:
    """Regenerate responses to prompts with the target, after removing prompts that a benchmark holds."""

    prompts: list[str] = setting("JSONL files, or folders of them: {id, turns: [text, ...]} a line.", [])
    sources: list[dict] = setting("Datasets with their shares (in a recipe): path, split, columns, share, ...", [])
    num_prompts: int | None = setting("Prompts to draw in all; the shares of sources are shares of it.", None, least=1)
    output: str = setting("Parquet file to write; a killed run goes on where it was.")
    target: str = setting(f"Hub id or folder of the target; {DEFAULT_TARGET} is the embedded one.", DEFAULT_TARGET)
    benchmarks: list[str] = setting("JSONL files or folders whose prompts must not be trained on.", [])
    removed: str | None = setting(
        "JSONL file for a list of what is removed as a benchmark's; one for each shard.", None
    )
    reuse: list[str] = setting("Parquet files with responses of this target that need not be generated again.", [])
    limit: int | None = setting("Prompts to answer newly at most; by default all.", None, least=0)
    shard: str | None = setting("K/N: answer the K-th of N parts of the prompts, for a machine each.", None)
    max_prompt_tokens: int = setting(
        "Longer prompts are left out; a conversation ends before a longer turn.", 512, least=1
    )
    max_new_tokens: int = setting("Where responses are cut.", 256, least=1)
    batch_size: int = setting("Prompts answered at once; a killed run loses at most so many.", 16, least=1)
    temperature: float = setting("0 for greedy responses.", 0.0, least=0)
    top_p: float = setting("Where sampled: the share of likeliest tokens to draw from.", 1.0, least=0)
    top_k: int = setting("Where sampled: the number of likeliest tokens to draw from, 0 for all.", 0, least=0)
    enable_thinking: bool | None = setting("Passed to the chat template; by default the template decides.", None)
    server: str | None = setting(
        "URL of an OpenAI-compatible server (vLLM, SGLang: http://host:8000/v1) that answers instead.",
        None,
    )
    server_model: str | None = setting("What the server calls the target; by default the first that it serves.", None)
    concurrency: int = setting(
        "Requests to the server at a time; batch_size should be several times that.", 64, least=1
    )
    retries: int = setting("Tries of a failed request after the first, with growing pauses.", 8, least=0)
    dtype: str = setting("Type of the target.", "bfloat16", DTYPES)
    seed: int = setting("For the draw and for sampling.", 0)
    features: str | None = setting(
        "Folder for the target's states on every row, computed once, so that training needs no pass of the target: "
        "(taps + 1) x hidden size x 2 bytes a token.",
        None,
    )
    drafter: dict = setting("For features: as for `train`; target_layer_ids or num_taps matter.", {})
    max_length: int = setting("For features: sequences are cut to this many tokens, as for `train`.", 3072, least=2)


@dataclass(kw_only=True)
class TrainArguments:
    """Train a drafter for a target on the target's own responses."""

    data: str = setting("Parquet file from `dflare data`, a folder of them, or a pattern such as 'out-*.parquet'.")
    output_dir: str = setting(
        "Checkpoints, from the newest of which the same command goes on, and in the end the drafter in `drafter/`."
    )
    target: str = setting(f"Hub id or folder of the target; {DEFAULT_TARGET} is the embedded one.", DEFAULT_TARGET)
    drafter: dict = setting("Arguments of DFlareConfig.from_target (num_hidden_layers, block_size, fusion, ...).", {})
    features: str | None = setting(
        "Folder that `dflare data --features` filled, instead of passes of the target.", None
    )
    start_from: str | None = setting("Hub id or folder of a drafter to train further, instead of a fresh one.", None)
    start_layers: str | None = setting(
        "Let a fresh drafter's layers begin as layers of the target: its last ones, or evenly spread ones.",
        None,
        (None, *START_LAYERS),
    )
    attention: str = setting(
        "The drafter's attention in training; flex_attention needs a GPU.", "sdpa", ("sdpa", "eager", "flex_attention")
    )
    trainer: dict = setting("Fields of DFlareTrainingArguments (learning_rate, gamma, num_anchors, ...).", {})
    max_length: int = setting("Sequences are cut to this many tokens.", 3072, least=2)
    validation_size: int = setting(
        "Rows of the data held back for validation, kept in `validation.parquet`.", 64, least=1
    )
    validation_data: str | None = setting(
        "Parquet file with the rows to validate on, left out of training by their ids; instead of validation_size.",
        None,
    )
    draft_vocab_size: int | None = setting(
        "Draft, and learn, only this many tokens, the most frequent in responses; by default all, or those of start_from.",
        None,
        least=1,
    )
    final_norm_start: float = setting("Start value of the final norm's scale.", 1.0)
    target_dtype: str = setting("Type of the frozen target.", "bfloat16", DTYPES)
    threads: int | None = setting("CPU threads; by default torch decides.", None, least=1)
    dry_run: bool = setting("Print parameters, memory, steps and device-hours instead of training.", False)
    num_rows: int | None = setting("Rows to count with in a dry run, where the data is not there yet.", None, least=1)
    num_devices: int = setting("Devices to count with in a dry run.", 1, least=1)
    device_tflops: float = setting(
        "Peak of a device in bf16 for a dry run; by default an NVIDIA H20's.", 148.0, least=0.001
    )
    utilisation: float = setting("Share of that peak that a dry run counts with.", 0.4, least=0.001)
    seed: int = setting("For the split, the start values, the order and the anchors.", 0)


SECTIONS = {"generate": GenerateArguments, "check": CheckArguments, "data": DataArguments, "train": TrainArguments}


def add_flags(parser: argparse.ArgumentParser, arguments: type) -> None:
    """A flag for each field of `arguments`; flags not given stay out of the namespace, so that a recipe can speak."""
    parser.add_argument(
        "--config", metavar="RECIPE", help="YAML file with a section for this subcommand, or a shipped recipe's name"
    )
    for item in dataclasses.fields(arguments):
        if item.type is dict:
            parser.add_argument(f"--{item.name}.KEY", metavar="VALUE", help=item.metadata["help"])
            continue
        kind, many = _kind_of(item.type)
        if kind is dict:
            continue  # in recipes only
        options: dict = {"help": _help_of(item), "dest": item.name, "default": argparse.SUPPRESS}
        if kind is bool:
            parser.add_argument(f"--{item.name}", action=argparse.BooleanOptionalAction, **options)
        else:
            options |= {"nargs": "+"} if many else {}
            parser.add_argument(f"--{item.name}", type=kind, choices=item.metadata["choices"], **options)


def _help_of(item: dataclasses.Field) -> str:
    factory: typing.Any = item.default_factory
    if item.default is factory is dataclasses.MISSING:
        return f"{item.metadata['help']} Required, here or in the recipe."
    default = factory() if item.default is dataclasses.MISSING else item.default
    return item.metadata["help"] if default in (None, [], False) else f"{item.metadata['help']} Default: {default}"


def resolve(arguments: type, section: str, namespace: argparse.Namespace, extra: list[str]):
    """
    The arguments object of a run.

    Args:
        namespace, extra: what argparse understood, and what it left over (the `--group.key value` pairs).
    Raises:
        ValueError: for an unknown key, a missing value, or a value of the wrong type, naming it.
    """
    given = vars(namespace).copy()
    recipe = given.pop("config", None)
    fields = {item.name: item for item in dataclasses.fields(arguments)}
    values = read_recipe(recipe, section, fields) if recipe else {}
    values |= {name: value for name, value in given.items() if name in fields}
    for group, key, value in _pairs(extra, fields):
        values[group] = {**values.get(group, {}), key: value}
    missing = [
        n for n, f in fields.items() if n not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{', '.join('--' + name for name in missing)}: missing, neither a flag nor in a recipe")
    for name, value in values.items():
        _check_type(name, value, fields[name])
    return arguments(**values)


def parse_sources(entries: list[dict]) -> list[Source]:
    """The `sources` of a recipe. Raises `ValueError` for an entry's unknown, missing or wrong key, naming it."""
    fields = {item.name: item for item in dataclasses.fields(Source)}
    for place, entry in enumerate(entries):
        for name, value in entry.items():
            check_name(f"sources[{place}]", name, fields)
            _check_type(f"sources[{place}].{name}", value, fields[name])
        if "path" not in entry:
            raise ValueError(f"sources[{place}].path is missing; found {entry}")
        if "{}" not in entry.get("format", "{}"):
            raise ValueError(f"sources[{place}].format is {entry['format']!r}, without a {{}} for the text")
    sources = [Source(**entry) for entry in entries]
    titles = [source.title for source in sources]
    for place, title in enumerate(titles):
        if title in titles[:place]:
            raise ValueError(
                f"sources[{place}] is called {title!r}, as sources[{titles.index(title)}] is; give one of them a name"
            )
    return sources


def read_recipe(path: str, section: str, fields: dict) -> dict:
    """The section of a YAML recipe. Raises `ValueError` for a file, section or key that is not what it should be."""
    recipe = load_recipe(recipe_file(path))
    for name in recipe:
        check_name(f"{path}: section", name, SECTIONS)
    values = recipe.get(section) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {section} is a mapping of settings, found {values!r}")
    for name in values:
        check_name(f"{path}: {section}", name, fields)
    return values


def recipe_file(name: str) -> Path:
    """The file of a recipe: a path, or the name of one that comes with the package (`qwen3-8b`)."""
    shipped = RECIPES / f"{name}.yaml"
    if not Path(name).is_file() and not shipped.is_file():
        known = sorted(str(file.relative_to(RECIPES).with_suffix("")) for file in RECIPES.rglob("*.yaml"))
        raise ValueError(f"--config: there is no file {name}, and no recipe of that name; there are {', '.join(known)}")
    return Path(name) if Path(name).is_file() else shipped


def load_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """
    A recipe with what it is based on: `base` names another recipe, beside it, whose keys stand unless they are set here.

    Raises:
        ValueError: for a file that is no mapping, a base that does not exist, or one that is based on this one.
    """
    import yaml

    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, found {type(recipe).__name__}")
    base = recipe.pop("base", None)
    if base is None:
        return recipe
    file = (path.parent / str(base)).resolve()
    if not file.is_file() or file in (*above, path.resolve()):
        raise ValueError(
            f"{path}: base is {base!r}, but {file} {'is based on this recipe' if file.is_file() else 'is missing'}"
        )
    return merged(load_recipe(file, (*above, path.resolve())), recipe)


def merged(base: dict, over: dict) -> dict:
    """`base` with the keys of `over`; mappings are merged, all else is replaced."""
    both = {
        key: merged(base[key], over[key])
        for key in base
        if isinstance(base[key], dict) and isinstance(over.get(key), dict)
    }
    return {**base, **over, **both}


def check_name(place: str, name: str, known: typing.Collection[str]) -> None:
    """Raises `ValueError` for a name that is none of the known ones, with the closest of them."""
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        raise ValueError(f"{place}: unknown key {name!r}; {hint}")


def _check_type(name: str, value, item: dataclasses.Field) -> None:
    kind, many = _kind_of(item.type)
    allowed = (int, float) if kind is float else kind
    optional = type(None) in typing.get_args(item.type)
    values = value if many and isinstance(value, list) else [value]
    wrong = [v for v in values if not isinstance(v, allowed) or (isinstance(v, bool) and kind is not bool)]
    if (wrong and not (optional and value is None)) or (many and not isinstance(value, list)):
        raise ValueError(f"{name}: expected {'a list of ' if many else ''}{kind.__name__}, found {value!r}")
    choices, least = item.metadata["choices"], item.metadata["least"]
    if choices and value not in choices:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(choices)}")
    if least is not None and value is not None and value < least:
        raise ValueError(f"{name} is {value}; the least is {least}")


def _pairs(extra: list[str], fields: dict) -> typing.Iterator[tuple[str, str, object]]:
    known = [f"--{name}." if item.type is dict else f"--{name}" for name, item in fields.items()]
    words = itertools.chain.from_iterable(w.split("=", 1) if w.startswith("--") else [w] for w in extra)
    for flag in words:
        group, _, key = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or f"--{group}." not in known or not key:
            close = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the known ones"
            raise ValueError(f"unknown argument {flag!r}; {hint}")
        value = next(words, None)
        if value is None:
            raise ValueError(f"{flag}: missing its value")
        yield group, key, _parse_value(value)


def _parse_value(text: str):
    """A flag's value: JSON where it is JSON (numbers, true, null, lists), else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _kind_of(annotation) -> tuple[type, bool]:
    """The plain type behind an annotation such as `int | None` or `list[str]`, and whether it is a list."""
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    inner = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return (inner[0] if inner else annotation), False
