"""DFlare: block-diffusion drafters that make Hugging Face targets generate the same text sooner (arXiv 2606.02091)."""

import importlib
import os
import sys

_HOMES = {
    "DFlareConfig": "configuration_dflare",
    "DFlareForBlockDiffusion": "modeling_dflare",
    "DraftRecord": "candidates_dflare",
    "DraftRound": "candidates_dflare",
    "install_hook": "hook_dflare",
    "record_drafts": "candidates_dflare",
    "uninstall_hook": "hook_dflare",
}
__all__ = sorted([*_HOMES, "register"])
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def register() -> None:
    """Lets `AutoConfig` and `AutoModel` load drafters without `trust_remote_code`, and hooks them into `generate()`."""
    from transformers import AutoConfig, AutoModel

    from .configuration_dflare import DFlareConfig
    from .modeling_dflare import DFlareForBlockDiffusion

    AutoConfig.register(DFlareConfig.model_type, DFlareConfig, exist_ok=True)
    AutoModel.register(DFlareConfig, DFlareForBlockDiffusion, exist_ok=True)


# The console command answers --help without torch; it registers when a subcommand starts to work.
if os.path.basename(sys.argv[0]) != "dflare":
    register()
