"""
How `generate()` finds a DFlare drafter. Four methods of `GenerationMixin` are wrapped once, when the drafter's code is
imported; the wrappers hand over to the assistant model if it defines the two methods below, and to the original for
everything else (other assistants, prompt lookup, transformers' native DFlash, MTP). They look for names, not classes,
so several loaded copies of this file serve each other's drafters, and hold no state.

    assistant.check_target(target, generation_config)        before any work; raises what cannot be accelerated
    assistant.make_candidate_generator(target, **call)       the candidate generator of this one call
    assistant.decode_batch(target, stock, input_ids, **call) the output of a call that the original loop cannot serve

The third wrapper only notes the stopping criteria of such a call on the call's own copy of the generation config: the
stock loop tests them once per block, so the candidate generator must end its draft where one would fire.

Who refuses a patched class calls `uninstall_hook()` and `drafter.attach(target)`, which wraps the same methods on that
one target.
"""

import copy
import functools
import threading

from transformers import GenerationMixin, PreTrainedModel

# What `generate()` hands to a decoding method besides the inputs of the model.
DECODING_ARGUMENTS = (
    *("generation_config", "logits_processor", "stopping_criteria", "streamer", "synced_gpus"),
    *("inputs_tensor", "assistant_tokenizer", "tokenizer"),
)
MARK = "_dflare_original"
CRITERIA = "_dflare_stopping_criteria"
ATTACHED = "_dflare_attached_to"
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
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1  # which the original insists on; `decode_batch` takes more
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


def _wrap_decoding(original):
    @functools.wraps(original)
    def assisted_decoding(self, input_ids, *args, **kwargs):
        assistant_model, config = kwargs.get("assistant_model"), kwargs.get("generation_config")
        refused = (
            len(input_ids) > 1 or self.device.type == "meta"
        )  # by the original: a batch, and weights all offloaded
        if refused and _accepts(assistant_model) and config.speculation_type is None:
            known = {name: kwargs.pop(name) for name in DECODING_ARGUMENTS if name in kwargs}
            del kwargs["assistant_model"]
            return assistant_model.decode_batch(self, original, input_ids, **known, model_kwargs=kwargs)
        return original(self, input_ids, *args, **kwargs)

    return assisted_decoding


WRAPPERS = {
    "_validate_generation_mode": _wrap_validation,
    "_get_candidate_generator": _wrap_factory,
    "_get_stopping_criteria": _wrap_stopping,
    "_assisted_decoding": _wrap_decoding,
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
    """
    Wraps the methods for this one target (or the one inside a compiled or PEFT wrapper), whatever its class does: it gets
    a class of its own, of the same name, since `generate()` asks the class for some of them. That class lies in no module,
    so detach a target before it is pickled.
    """
    target = _innermost(target)
    if ATTACHED in vars(type(target)):
        return
    base = type(target)
    methods = {name: wrap(getattr(getattr(base, name), MARK, getattr(base, name))) for name, wrap in WRAPPERS.items()}
    target.__class__ = type(base.__name__, (base,), {**methods, ATTACHED: base, "__module__": base.__module__})


def detach_from(target) -> None:
    """Undoes `attach_to`; a target that is not attached is left alone."""
    target = _innermost(target)
    target.__class__ = vars(type(target)).get(ATTACHED, type(target))


def _innermost(target) -> PreTrainedModel:
    """The model itself inside `torch.compile` and PEFT wrappers; `TypeError` if there is none that can generate."""
    model = target
    while not isinstance(model, GenerationMixin):
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            raise TypeError(f"target is a {type(target).__name__}; a model with generate() is expected")
    return model
