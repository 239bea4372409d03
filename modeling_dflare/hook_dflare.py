"""
How `generate()` finds a DFlare drafter. Three methods of `GenerationMixin` are wrapped once, when the drafter's code is
imported; the wrappers hand over to the assistant model if it defines the two methods below, and to the original for
everything else (other assistants, prompt lookup, transformers' native DFlash, MTP). They look for names, not classes,
so several loaded copies of this file serve each other's drafters, and hold no state.

    assistant.check_target(target, generation_config)        before any work; raises what cannot be accelerated
    assistant.make_candidate_generator(target, **call)       the candidate generator of this one call

The third wrapper only notes the stopping criteria of such a call on the call's own copy of the generation config: the
stock loop tests them once per block, so the candidate generator must end its draft where one would fire.

Who refuses a patched class calls `uninstall_hook()` and `drafter.attach(target)`, which wraps the same methods on that
one target.
"""

import functools
import threading
from types import MethodType

from transformers import GenerationMixin, PreTrainedModel

MARK = "_dflare_original"
CRITERIA = "_dflare_stopping_criteria"
_lock = threading.Lock()


def _accepts(assistant_model) -> bool:
    return hasattr(assistant_model, "make_candidate_generator") and hasattr(assistant_model, "check_target")


def _wrap_validation(original):
    @functools.wraps(original)
    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant_model = generation_mode_kwargs.get("assistant_model")
        if _accepts(assistant_model) and generation_config.speculation_type is None:
            assistant_model.check_target(self, generation_config)
            setattr(generation_config, CRITERIA, ())
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_factory(original):
    @functools.wraps(original)
    def get_candidate_generator(self, *args, **kwargs):
        assistant_model, config = kwargs.get("assistant_model"), kwargs.get("generation_config")
        if _accepts(assistant_model) and config.speculation_type is None:
            return assistant_model.make_candidate_generator(
                self,
                generation_config=config,
                input_ids=kwargs["input_ids"],
                logits_processor=kwargs["logits_processor"],
                model_kwargs=kwargs["model_kwargs"],
                stopping_criteria=getattr(config, CRITERIA, ()),
            )
        return original(self, *args, **kwargs)

    return get_candidate_generator


def _wrap_stopping(original):
    @functools.wraps(original)
    def get_stopping_criteria(self, *args, **kwargs):
        criteria = original(self, *args, **kwargs)
        if hasattr(kwargs["generation_config"], CRITERIA):  # set by the validation of a call of ours
            setattr(kwargs["generation_config"], CRITERIA, criteria)
        return criteria

    return get_stopping_criteria


WRAPPERS = {
    "_validate_generation_mode": _wrap_validation,
    "_get_candidate_generator": _wrap_factory,
    "_get_stopping_criteria": _wrap_stopping,
}


def install_hook() -> None:
    """Wraps the methods of `GenerationMixin`, once per process, whoever calls it and from whatever thread."""
    with _lock:
        for name, wrap in WRAPPERS.items():
            original = getattr(GenerationMixin, name)
            if not hasattr(original, MARK):
                wrapper = wrap(original)
                setattr(wrapper, MARK, original)
                setattr(GenerationMixin, name, wrapper)


def uninstall_hook() -> None:
    """Puts the original methods back."""
    with _lock:
        for name in WRAPPERS:
            original = getattr(getattr(GenerationMixin, name), MARK, None)
            if original is not None:
                setattr(GenerationMixin, name, original)


def attach_to(target) -> None:
    """Wraps the methods on this one target (or the one inside a compiled or PEFT wrapper), whatever the class does."""
    target = _innermost(target)
    for name, wrap in WRAPPERS.items():
        method = getattr(type(target), name)
        setattr(target, name, MethodType(wrap(getattr(method, MARK, method)), target))


def detach_from(target) -> None:
    """Undoes `attach_to`; a target that is not attached is left alone."""
    target = _innermost(target)
    for name in WRAPPERS:
        target.__dict__.pop(name, None)


def _innermost(target) -> PreTrainedModel:
    """The model itself inside `torch.compile` and PEFT wrappers."""
    while not isinstance(target, GenerationMixin):
        target = target._orig_mod if hasattr(target, "_orig_mod") else target.get_base_model()
    return target
