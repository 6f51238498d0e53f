"""Converts checkpoints with dense attention (Llama, Mistral, Qwen2, Qwen3) to `NSAForCausalLM`.

    python -m nsa_torch.huggingface.convert SOURCE TARGET
    python -m nsa_torch.huggingface.convert SOURCE TARGET --set num_selected=64 --check 512

SOURCE is a folder or owner/name on the Hugging Face Hub. TARGET is the folder that the command
creates. Weights are read and written one safetensors file at a time.

  | in transformers | in NSA                    | change                                      |
  |-----------------|---------------------------|---------------------------------------------|
  | q_proj          | W_Q                       | rows of each head are reordered (`pairs`)   |
  | k_proj          | W_K_cmp, W_K_sel, W_K_win | one reordered copy per branch               |
  | v_proj          | W_V_cmp, W_V_sel, W_V_win | one copy per branch, scaled (see `--start`) |
  | o_proj          | out                       | unchanged                                   |
  | q_norm, k_norm  | q_norm, k_norm            | columns are reordered (`pairs`)             |
  | all others      | the same names            | unchanged                                   |

A layer that stays dense stores its keys and values once, as W_K and W_V. Up to num_selected *
select_block tokens, every block is selected, so that the converted model equals the dense model
with every `--start`:

- `--start values` sets all gates to 1/2. The value projection of the selected branch is doubled,
  and the value projections of the other branches are zero. With `--start values` all weights learn,
  but keys and gates of the branches whose value projections are zero learn only from the second
  step.
- `--start gates` sets the gate of the selected branch to 1 and the other gates to 0. With `--start
  gates` the value projections are unchanged, and only the selected branch learns.
- `--start shared` sets the gates as `--start gates` does. With `--start shared` all branches share
  keys and values, as W_K and W_V, so that the cache has a third of the size. With `--start shared`
  all weights except the gates learn.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from nsa_interop.weights import opened
from tokenizers import Tokenizer
from torch import Tensor, nn

from nsa_core import validate
from nsa_core.config import SIZES
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.model import NSAForCausalLM
from nsa_torch.module import NSAAttention

MODELS = ("llama", "mistral", "qwen2", "qwen3")
# Entries of the source's configuration that must have a fixed value, and entries that are copied.
PLAIN = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# The logits of the gates, and the factors of the values, for the compressed, selected and
# sliding branch. A factor of two and a gate of one half are exact in every dtype.
STARTS = {
    "values": ((0.0, 0.0, 0.0), (0.0, 2.0, 0.0)),
    "gates": ((-100.0, 100.0, -100.0), (1.0, 1.0, 1.0)),
    "shared": ((-100.0, 100.0, -100.0), (1.0,)),
}
SETTABLE = (*SIZES, "phi", "phi_hidden", "kv", "gate", "gate_hidden", "gate_temp", "key_taps")
WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IN_PAIRS = ("q_proj", "k_proj", "q_norm", "k_norm")
ATTENTION = re.compile(r"(model\.layers\.(\d+)\.self_attn)\.(\w+)\.(weight|bias)")
NAME = re.compile(r"\w[\w.-]*/[\w.-]+")  # the pattern of a model's name on the Hub
SOURCES = "must be a folder, or owner/name on the Hugging Face Hub"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BESIDE = (  # files that are copied along with the weights
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "additional_chat_templates/*", "generation_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
TIMES_YARDSTICK = 4  # upper bound of the difference between logits in `--check`


class DifferentError(Exception):
    """The logits of the converted model differ from the logits of the dense model."""


def pairs(x: Tensor, width: int) -> Tensor:
    """Reorder the rows of each head, which has `width` rows, for another pairing in the rotary
    embedding. transformers rotates rows i and i + width / 2 as a pair. In the result, rows i and i
    + width / 2 become the rows 2i and 2i + 1.
    """
    return x.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def configuration(
    source: transformers.PreTrainedConfig,
    dense_layers: Iterable[int] = (),
    **nsa: Any,
) -> NSAModelConfig:
    """Make the configuration of the converted model.

    Args:
      dense_layers: indices of layers that keep dense attention.
      nsa: Values for some of the names in `SETTABLE`.

    Raises:
      ValueError: The source cannot be converted exactly, or an argument is invalid. The error
        message gives the reason.
    """
    validate.one_of("model_type", source.model_type, MODELS)
    for name, plain in PLAIN.items():
        if (found := getattr(source, name, plain)) != plain:
            raise ValueError(f"{name} must be {plain!r}, got {found!r}")
    kinds = set(getattr(source, "layer_types", None) or ["full_attention"])
    window = getattr(source, "sliding_window", None)
    if kinds != {"full_attention"} or (source.model_type == "mistral" and window):
        raise ValueError(
            "all layers must attend to all keys, got "
            f"layer_types {sorted(kinds)} and sliding_window={window}"
        )
    if unknown := sorted(nsa.keys() - {*SETTABLE}):
        raise ValueError(
            f"options of a conversion must be among {SETTABLE}, got {unknown[0]!r}"
        )
    if nsa.get("gate") == "softmax":
        raise ValueError(
            "gate must not be 'softmax' in a converted model, since softmax gates add "
            "up to 1 and cannot all start at 1/2"
        )
    layers, dense_layers = range(source.num_hidden_layers), {*dense_layers}
    if outside := sorted(dense_layers.difference(layers)):
        raise ValueError(f"dense_layers must be in 0..{layers[-1]}, got {outside[0]}")
    attention = ["dense" if i in dense_layers else "nsa" for i in layers]
    own: dict[str, Any] = {name: getattr(source, name, None) for name in SAME}
    own |= {"rope_parameters": dict(own["rope_parameters"]), "gate": "sigmoid"}
    return NSAModelConfig(
        # Qwen2 has biases for query, key and value only, so the bias of the output starts as
        # zero.
        attention_bias=source.model_type == "qwen2" or getattr(source, "attention_bias", False),
        qk_norm=source.model_type == "qwen3",
        attention=attention if dense_layers else "nsa",
        **own | nsa,
    )


def converted(name: str, x: Tensor, config: NSAModelConfig, start: str) -> dict[str, Tensor]:
    """Convert the weight `name` of the dense model. Return the converted weights, keyed by their
    names in `NSAForCausalLM`.
    """
    found = ATTENTION.fullmatch(name)
    if found is None:
        return {name: x}
    stem, layer, part, leaf = found.groups()
    if part in IN_PAIRS:
        x = pairs(x, config.head_dim)
    is_nsa = config.layer_attention[int(layer)] == "nsa"
    keys, values = zip(
        *config.layer_spec.key_values if is_nsa else [("W_K", "W_V")], strict=True
    )
    ours = {"q_proj": ["W_Q"], "k_proj": keys, "v_proj": values, "o_proj": ["out"]}
    names = ours.get(part, [part])
    factors: Sequence[float] = (1.0,) * len(names)
    if part == "v_proj" and is_nsa:
        factors = STARTS[start][1]
        # the weights from `added` make the values zero in the last layer of `phi`
        if config.phi.startswith("mlp_"):
            factors = 1.0, *factors[1:]
    # Clones are made since a file must not contain a tensor twice.
    each = (x.clone() if factor == 1 else x * factor for factor in factors)
    return {f"{stem}.{y}.{leaf}": z for y, z in zip(names, each, strict=True)}


def added(config: NSAModelConfig, source: set[str], start: str) -> dict[str, Tensor]:
    """Make the weights that the dense model does not have: gates, `phi`, convolutions of keys,
    and some biases.
    """
    found: dict[str, Tensor] = {}
    spec = config.layer_spec
    for index, kind in enumerate(config.layer_attention):
        stem = f"model.layers.{index}.self_attn"
        if spec.bias and f"{stem}.o_proj.bias" not in source:
            found[f"{stem}.out.bias"] = torch.zeros(spec.dim)
        if kind == "dense":
            continue
        layer = NSAAttention(**spec.as_dict(), device="meta")
        for name, part in layer.named_children():
            if name.startswith("phi_") or (name == "gate" and [*part.parameters()]):
                part.to_empty(device="cpu")
                cast(Any, part).reset_parameters()
        if spec.key_taps is not None:  # taps of zero leave the keys unchanged
            layer.key_conv.to_empty(device="cpu")
            nn.init.zeros_(layer.key_conv.weight)
        logits, (compressed, *_) = STARTS[start]
        if config.gate != "selected":  # gate 'selected' has no weights
            cast(Any, layer.gate).set_constant(*logits)
        # otherwise `phi` of values that are zero would not be zero
        if config.phi.startswith("mlp_") and compressed == 0:
            nn.init.zeros_(layer.phi_v_mlp.w2)
            nn.init.zeros_(layer.phi_v_mlp.b2)
        found |= {f"{stem}.{k}": x for k, x in layer.state_dict().items() if not x.is_meta}
    return {name: x for name, x in found.items() if ".kind." not in name}


def convert(
    source: str | Path,
    target: str | Path,
    *,
    start: str = "values",
    dtype: torch.dtype | None = None,
    dense_layers: Iterable[int] = (),
    check: int | None = None,
    **nsa: Any,
) -> NSAModelConfig:
    """Convert the model at `source` to NSA and write the converted model to the folder `target`. If
    an error occurs, `target` is not created.

    Args:
      source: a folder, or owner/name on the Hugging Face Hub.
      start: "values", "gates" or "shared", as the module describes.
      dtype: dtype of the written weights; None means the dtype of the source.
      dense_layers, nsa: as in the function `configuration`.
      check: Number of tokens for which the logits of both models are compared, in float32.
        `check=None` means no comparison.

    Raises:
      ValueError: The source cannot be converted exactly, or an argument is invalid.
      OSError: The target exists, or a file of the source does not exist.
      DifferentError: The logits differ by more than a bound. The bound is 4 times the difference
        between the dense implementations `eager` and `sdpa`, plus one rounding of the largest
        logit.
    """
    target = Path(target)
    validate.one_of("start", start, (*STARTS,))
    validate.one_of("dtype", dtype, (None, *WORDS.values()))
    if start == "values" and nsa.get("gate") == "selected":
        raise ValueError(
            "gate must not be 'selected' if start='values'; start='values' sets all "
            "gates to 1/2, but the gates of 'selected' are always 0, 1, 0"
        )
    kv = "shared" if start == "shared" else "separate"
    if nsa.setdefault("kv", kv) != kv:
        raise ValueError(f"kv must be {kv!r} if start={start!r}, got {nsa['kv']!r}")
    if target.exists():
        raise FileExistsError(f"{target} must not exist")
    if not Path(source).is_dir() and not NAME.fullmatch(str(source)):
        raise FileNotFoundError(f"{source} {SOURCES}; there is no such folder")
    theirs = transformers.AutoConfig.from_pretrained(source)
    config = configuration(theirs, dense_layers, **nsa)
    reach = config.num_selected * config.select_block
    if check is not None:
        validate.sizes(check=check)
        if check > reach:
            raise ValueError(
                f"check must be in 1..{reach} tokens (num_selected * select_block), since NSA "
                f"equals dense attention only up to this length, got {check}"
            )
    folder = Path(source)
    if not folder.is_dir():
        patterns = ["*.safetensors", INDEX, *BESIDE]
        folder = Path(snapshot_download(str(source), allow_patterns=patterns))
    files = _files(folder)
    _check_tokenizer(folder, config.vocab_size)
    config.architectures = [NSAForCausalLM.__name__]
    config.converted_from = {
        "model": str(source), "model_type": theirs.model_type, "start": start
    }  # fmt: skip
    there = next(parent for parent in target.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=there) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        _write(made, files, config, start, dtype)
        config.save_pretrained(made)
        NSAForCausalLM.from_pretrained(made, device_map="meta")  # checks that all weights exist
        for path in sorted({path for pattern in BESIDE for path in folder.glob(pattern)}):
            if path.is_file():
                place = made / path.relative_to(folder)
                place.parent.mkdir(exist_ok=True)
                shutil.copy(path, place)
        if check is not None:
            _compare(folder, made, check, config)
        target.parent.mkdir(parents=True, exist_ok=True)
        made.rename(target)
    return config


def _files(folder: Path) -> dict[str, Any]:
    """Open and return the files of weights that transformers reads. A single file has priority
    over several files.

    Raises:
      FileNotFoundError: No safetensors file exists, or one of several files is missing.
      ValueError: A file is not a complete safetensors file, or the index is not JSON.
    """
    index, names = folder / INDEX, [SINGLE]
    if not (folder / SINGLE).is_file():
        if not index.exists():
            raise FileNotFoundError(
                f"{folder} must have its weights in {SINGLE} or in the files that {INDEX} lists, "
                "got neither; save_pretrained of transformers writes them"
            )
        names = sorted({*json.loads(index.read_text())["weight_map"].values()})
    files = {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise FileNotFoundError(
                f"{index} must list only existing files of its folder, got {name}"
            )
        files[name] = opened(folder / name)
    return files


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Check that each token of the tokenizer has a row of the embedding."""
    path = folder / "tokenizer.json"
    found = Tokenizer.from_file(str(path)).get_vocab().values() if path.exists() else ()
    if (largest := max(found, default=-1)) >= vocab_size:
        raise ValueError(
            f"{path} must have tokens below vocab_size={vocab_size}, got {largest}"
        )


def _write(
    target: Path,
    files: dict[str, Any],
    config: NSAModelConfig,
    start: str,
    dtype: torch.dtype | None,
) -> None:
    """Write one output file for each of `files`. The last file also has the weights from
    `added`."""
    source = {name: weights for weights in files.values() for name in weights.keys()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the seed of weights that are initialized at random
        extra = added(config, {*source}, start)
    places: dict[str, str] = {}
    size = 0
    for file, weights in files.items():
        made: dict[str, Tensor] = {}
        for name in weights.keys():
            x = weights.get_tensor(name)
            if x.dtype not in WORDS.values():
                raise ValueError(f"{name} must be in {' or '.join(WORDS)}, got {x.dtype}")
            if name == EMBEDDING:
                config.dtype = dtype or x.dtype
            if name == HEAD and config.tie_word_embeddings:
                # transformers reads an output head that differs from the embedding. In that case
                # it does not tie the two.
                if not torch.equal(x, source[EMBEDDING].get_tensor(EMBEDDING).to(x)):
                    raise ValueError(
                        f"{HEAD} must be equal to {EMBEDDING} if tie_word_embeddings is true; set "
                        "tie_word_embeddings=false in config.json"
                    )
            elif not name.endswith("rotary_emb.inv_freq"):
                each = converted(name, x, config, start)
                made |= {ours: y.to(dtype or x.dtype) for ours, y in each.items()}
        if file == [*files][-1]:
            made |= {name: x.to(config.dtype) for name, x in extra.items()}
        for name, x in made.items():
            if not x.isfinite().all():
                raise ValueError(
                    f"{name} must be finite in {x.dtype} after the conversion with "
                    f"start={start!r}, got NaN or infinity"
                )
        safetensors.torch.save_file(made, target / file, {"format": "pt"})
        places |= dict.fromkeys(made, file)
        size += sum(x.nbytes for x in made.values())
    if SINGLE not in files:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@torch.no_grad()
def _compare(folder: Path, made: Path, count: int, config: NSAModelConfig) -> None:
    """Compare the logits of both models on random tokens, one model at a time."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, count), generator=generator)
    load = transformers.AutoModelForCausalLM.from_pretrained
    dense = load(folder, dtype=config.dtype, use_safetensors=True).float().eval()
    ways = []
    for way in ("eager", "sdpa"):
        dense.set_attn_implementation(way)
        ways.append(dense(tokens, use_cache=False).logits)
    del dense
    ours = load(made, dtype=config.dtype).float().eval()
    found = float((ours(tokens, use_cache=False).logits - ways[1]).abs().max())
    rounding = torch.finfo(torch.float32).eps * float(ways[1].abs().max())
    limit = TIMES_YARDSTICK * (float((ways[0] - ways[1]).abs().max()) + rounding)
    line = f"logits of {count} tokens differ by {found:.1e}; the limit is {limit:.1e}"
    if not found <= limit:
        raise DifferentError(line)
    print(line)


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status: 0, or 1 if `--check` finds a difference, or 2 if
    nothing was converted.
    """
    parser = argparse.ArgumentParser(
        "python -m nsa_torch.huggingface.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE")
    add("target", metavar="TARGET")
    add("--start", choices=STARTS, default="values")
    add(
        "--set", type=setting, metavar="NAME=VALUE", nargs="+", action="extend", default=[],
        help=f"NAME=VALUE pairs for any of {', '.join(SETTABLE)}",
    )  # fmt: skip
    add(
        "--dense_layers", type=integers, default=[],
        help="comma-separated indices of layers that keep dense attention, such as 0,1",
    )  # fmt: skip
    add("--dtype", choices=WORDS, help="dtype of the written weights; default: that of SOURCE")
    add(
        "--check", type=int, metavar="TOKENS",
        help=
            "number of tokens for which the logits of both models are compared, in float32 on the "
            "CPU; default: no comparison"
        ,
    )  # fmt: skip
    given = vars(parser.parse_args(arguments))
    nsa, given["dtype"] = dict(given.pop("set")), WORDS.get(given["dtype"])
    try:
        config = convert(**given, **nsa)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DifferentError as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    reach = config.num_selected * config.select_block
    print(
        f"{given['target']} is written; up to {reach} tokens the model equals the dense model"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
