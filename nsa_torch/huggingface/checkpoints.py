"""`from_pretrained` that takes a checkpoint only if it is one of this model, in safetensors: other
files of weights are pickles, which may run code.
"""

from collections.abc import Callable
from typing import Any

from nsa_core.layer import KIND, SILENT
from nsa_torch.huggingface.configuration import NSAModelConfig

# Where the files are; the rest of from_pretrained's keywords says how to read them.
PLACE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def load(cls, from_pretrained: Callable, path, args: tuple, kwargs: dict[str, Any]):
    """What `from_pretrained(path, *args, **kwargs)` returns, checked (see `NSAPreTrainedModel`)."""
    strict = kwargs.pop("strict", True)
    wants_info = kwargs.pop("output_loading_info", False)
    other_sizes = kwargs.pop("ignore_mismatched_sizes", False)
    if kwargs.get("use_safetensors") is False:
        raise ValueError(
            "use_safetensors must be True or not given, got False: weights in pickles are not read"
        )
    kwargs["use_safetensors"] = True
    stated: dict[str, Any] = {}
    if path is not None:
        place = {name: kwargs[name] for name in PLACE if name in kwargs}
        stated, _ = NSAModelConfig.get_config_dict(path, **place)
        NSAModelConfig.from_dict(stated)  # refuses another model's
    model, info = from_pretrained(
        path, *args, **kwargs, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for name in KIND if stated else ():
        ours = getattr(model.config, name)
        theirs = stated.get(name, SILENT.get(name, "no such name"))
        if ours != theirs:
            raise ValueError(
                f"{name} must be {theirs!r} as in the checkpoint {path}, got {ours!r}"
            )
    if info["mismatched_keys"] and not other_sizes:
        key, found, expected = sorted(info["mismatched_keys"])[0]
        raise ValueError(f"{path}: {key}: expected shape {tuple(expected)}, got {tuple(found)}")
    for what in ("missing", "unexpected"):
        keys = sorted(info[f"{what}_keys"])
        if strict and keys:
            rest = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(
                f"{path} must have the weights of {cls.__name__}, got {what} {keys[0]}{rest}; "
                "strict=False draws anew what is missing and leaves out what is unknown"
            )
    return (model, info) if wants_info else model
