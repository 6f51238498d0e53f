"""Checkpoints with dense attention as `NSAForCausalLM`: Llama, Mistral, Qwen2, Qwen3.

    python -m nsa_torch.huggingface.convert SOURCE TARGET
    python -m nsa_torch.huggingface.convert SOURCE TARGET --set num_selected=64 --check 512

SOURCE is a folder or owner/name on the Hugging Face Hub; TARGET becomes a folder. Weights are read
and written a safetensors file at a time.

  transformers     here                         how
  q_proj           W_Q                          rows of a head from halves to pairs (`pairs`)
  k_proj           W_K_cmp, W_K_sel, W_K_win    the same, three times
  v_proj           W_V_cmp, W_V_sel, W_V_win    three times, by `--start`
  o_proj           out                          as it is
  q_norm, k_norm   q_norm, k_norm               columns from halves to pairs
  the rest         the same names               as it is

A dense layer keeps its keys and values once, as W_K and W_V. Where every block is selected, up to
num_selected * select_block tokens, the model computes what the dense one does, whatever the start:

  --start   gates      values                                  learns
  values    1/2 each   selected twice as large, others zero    everything; keys and gates of the
                                                               zero branches from the second step
  gates     0, 1, 0    as they are                             the selected branch alone, for ever
  shared    0, 1, 0    once for all branches, as W_V; keys     everything but the gates
                       too, as W_K: a third of the cache
"""

import argparse
import contextlib
import json
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from nsa_core import validate
from nsa_core.config import SIZES
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.model import NSAForCausalLM
from nsa_torch.module import NSAAttention

MODELS = ("llama", "mistral", "qwen2", "qwen3")
# Logits of the gates; factors of the values of the compressed, selected and sliding branch.
# A factor of two, and a gate of a half, are exact in every dtype.
STARTS = {
    "values": ((0.0, 0.0, 0.0), (0.0, 2.0, 0.0)),
    "gates": ((-100.0, 100.0, -100.0), (1.0, 1.0, 1.0)),
    "shared": ((-100.0, 100.0, -100.0), (1.0,)),
}
SETTABLE = (
    *SIZES,
    *("phi", "phi_hidden", "gate", "gate_hidden", "gate_temp"),
)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BRANCHES = ("cmp", "sel", "win")
OURS = {
    "nsa": {
        "q_proj": ("W_Q",),
        "k_proj": tuple(f"W_K_{x}" for x in BRANCHES),
        "v_proj": tuple(f"W_V_{x}" for x in BRANCHES),
        "o_proj": ("out",),
    },
    "dense": {"q_proj": ("W_Q",), "k_proj": ("W_K",), "v_proj": ("W_V",), "o_proj": ("out",)},
}
IN_PAIRS = ("q_proj", "k_proj", "q_norm", "k_norm")
ATTENTION = re.compile(r"(model\.layers\.(\d+)\.self_attn)\.(\w+)\.(weight|bias)")
NAME = re.compile(r"\w[\w.-]*/[\w.-]+")  # on the Hub
SOURCES = "must be a folder, or owner/name on the Hugging Face Hub"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GENERATION = "generation_config.json"
BESIDE = (  # files that go with the weights as they are
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "additional_chat_templates/*", GENERATION,
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
TIMES_YARDSTICK = 4  # that the logits of `--check` may be apart


class DifferentError(Exception):
    """The converted model does not compute what its source does."""


def pairs(x: Tensor, width: int) -> Tensor:
    """Rows of heads of `width` from (i, i + width / 2), which transformers rotates together, to
    (2i, 2i + 1).
    """
    return x.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def configuration(
    source: transformers.PreTrainedConfig,
    dense_layers: Iterable[int] = (),
    kv: str = "separate",
    **nsa: Any,
) -> NSAModelConfig:
    """That of the converted model.

    Args:
      dense_layers: numbers of layers that keep dense attention.
      kv: as in `nsa_torch.NSAAttention`.
      nsa: some of `SETTABLE`.

    Raises:
      ValueError: the source is no model that converts exactly, named by what it has.
    """
    if source.model_type not in MODELS:
        raise ValueError(f"model_type must be one of {MODELS}, got {source.model_type!r}")
    for name, plain in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("attention_dropout", 0.0),
        ("quantization_config", None),
    ):
        if (found := getattr(source, name, plain)) != plain:
            raise ValueError(f"{name} must be {plain!r}, got {found!r}")
    kinds = set(getattr(source, "layer_types", None) or ["full_attention"])
    window = getattr(source, "sliding_window", None)
    if kinds != {"full_attention"} or (source.model_type == "mistral" and window):
        raise ValueError(
            "all layers must attend to all keys, got "
            f"layer_types {sorted(kinds)} and sliding_window={window}"
        )
    unknown = [name for name in nsa if name not in SETTABLE]
    if unknown:
        raise ValueError(f"{unknown[0]} must be one of {SETTABLE}")
    if nsa.get("gate", "sigmoid") == "softmax":
        raise ValueError("gate must not be 'softmax': its gates cannot start as 0, 1, 0 or 1/2")
    layers = range(source.num_hidden_layers)
    if not isinstance(dense_layers, Iterable):
        raise ValueError(f"dense_layers must be several ints, got {dense_layers!r}")
    dense_layers = set(dense_layers)
    if outside := sorted(dense_layers - set(layers)):
        raise ValueError(f"dense_layers must be in 0..{layers[-1]}, got {outside[0]}")
    own: dict[str, Any] = {"kv": kv, "gate": "sigmoid"} | nsa
    attention = ["dense" if i in dense_layers else "nsa" for i in layers]
    return NSAModelConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None),
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=dict(source.rope_parameters),
        # Qwen2 has biases of query, key and value; that of the output is zero then.
        attention_bias=source.model_type == "qwen2" or getattr(source, "attention_bias", False),
        qk_norm=source.model_type == "qwen3",
        attention=attention if dense_layers else "nsa",
        tie_word_embeddings=source.tie_word_embeddings,
        pad_token_id=source.pad_token_id,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        **own,
    )


def converted(name: str, x: Tensor, config: NSAModelConfig, start: str) -> dict[str, Tensor]:
    """The weight `name` of the dense model under the names of `NSAForCausalLM`."""
    found = ATTENTION.fullmatch(name)
    if found is None:
        return {name: x}
    stem, layer, part, leaf = found.groups()
    if part in IN_PAIRS:
        x = pairs(x, config.head_dim)
    kind = config.layer_attention[int(layer)]
    ours = OURS["dense" if config.kv == "shared" else kind].get(part, (part,))
    factors: Sequence[float] = (1.0,) * len(ours)
    if part == "v_proj" and kind == "nsa":
        factors = STARTS[start][1]
        if _has_mlp(config):  # whose last layer makes the values zero (`added`)
            factors = 1.0, *factors[1:]
    # Clones: a file holds no tensor twice.
    each = (x.clone() if factor == 1 else x * factor for factor in factors)
    return {f"{stem}.{y}.{leaf}": z for y, z in zip(ours, each, strict=True)}


def _has_mlp(config: NSAModelConfig) -> bool:
    return config.phi.startswith("mlp_")


def added(config: NSAModelConfig, source: set[str], start: str) -> dict[str, Tensor]:
    """The weights that a dense model with those of `source` has not: gates, `phi`, some biases."""
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
        logits, (compressed, *_) = STARTS[start]
        if config.gate != "selected":  # which has no weights
            cast(Any, layer.gate).set_constant(*logits)
        if _has_mlp(config) and compressed == 0:  # of values that are zero it would not be
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
    """Writes the model at `source` as one with NSA to the folder `target`, all or nothing.

    Args:
      source: a folder, or owner/name on the Hugging Face Hub.
      start: "values", "gates" or "shared", as above.
      dtype: of the weights; None: as they are.
      dense_layers, nsa: as of `configuration`.
      check: tokens on which the logits are compared with the dense model's, in float32.

    Raises:
      ValueError: the source, or an argument, is none that converts exactly.
      OSError: the target is there, or a file of the source is not.
      DifferentError: the logits of `check` are further apart than dense attention's own two ways
        (`eager`, `sdpa`) by more than a factor of 4.
    """
    target = Path(target)
    if start not in tuple(STARTS):
        raise ValueError(f"start must be one of {tuple(STARTS)}, got {start!r}")
    if dtype not in (None, *WORDS.values()):
        raise ValueError(f"dtype must be one of {tuple(WORDS.values())} or None, got {dtype!r}")
    if start == "values" and nsa.get("gate") == "selected":
        raise ValueError(
            "gate must not be 'selected' where start='values', whose gates are 1/2"
        )
    if "kv" in nsa:
        raise ValueError(
            f"kv must not be given, got {nsa['kv']!r}; start='shared' converts with kv='shared', "
            "other starts with kv='separate'"
        )
    if target.exists():
        raise FileExistsError(f"{target} must not be there before")
    if not Path(source).is_dir() and not NAME.fullmatch(str(source)):
        raise FileNotFoundError(f"{source} {SOURCES}; there is no such folder")
    theirs = _theirs(source)
    kv = "shared" if start == "shared" else "separate"
    config = configuration(theirs, dense_layers, kv, **nsa)
    reach = config.num_selected * config.select_block
    if check is not None:
        validate.sizes(check=check)
    if check is not None and check > reach:
        raise ValueError(
            f"check must be in 1..{reach} tokens (num_selected * select_block), where NSA is "
            f"dense attention, got {check}"
        )
    folder = _folder(source)
    files = _files(folder)
    kept = _checked(folder, files, theirs)
    _check_tokenizer(folder, config.vocab_size)
    if (folder / GENERATION).exists():
        _stated(folder / GENERATION)
    config.architectures = [NSAForCausalLM.__name__]
    config.dtype = dtype or kept
    config.converted_from = {
        "model": str(source),
        "model_type": theirs.model_type,
        "start": start,
    }
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    made = [parent for parent in scratch.absolute().parents if not parent.exists()]
    try:
        scratch.mkdir(parents=True)
        _write(scratch, folder, files, config, start, dtype)
        config.save_pretrained(scratch)
        for path in sorted({path for pattern in BESIDE for path in folder.glob(pattern)}):
            if path.is_file():
                place = scratch / path.relative_to(folder)
                place.parent.mkdir(exist_ok=True)
                shutil.copy(path, place)
        if check is not None:
            _compare(folder, scratch, check, config)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # of a folder that is not empty
            for parent in made:
                parent.rmdir()
    return config


def _theirs(source: str | Path) -> transformers.PreTrainedConfig:
    """The dense model's configuration.

    Raises:
      OSError: there is none.
      ValueError: it is none of transformers; of its checks some raise other kinds of errors.
    """
    try:
        return transformers.AutoConfig.from_pretrained(source)
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, OSError):
            raise OSError(f"{source} {SOURCES}, got no config.json: {text}") from error
        raise ValueError(
            f"{source} must have a config.json that transformers reads, got "
            f"{type(error).__name__}: {text}"
        ) from error


def _folder(source: str | Path) -> Path:
    """Where the files are, downloaded where `source` is a name on the Hub."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(str(source), allow_patterns=["*.safetensors", INDEX, *BESIDE])
    )


def _files(folder: Path) -> list[str]:
    """The files of weights: those that transformers reads, one before several.

    Raises:
      FileNotFoundError: there is none of safetensors, or one of several is missing.
      ValueError: the index of several does not name them, or names other places.
    """
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).exists():
        places = _stated(folder / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder / INDEX} must have a weight_map, got {places!r:.60}")
        found = sorted(set(map(str, places.values())))
        if outside := [x for x in found if not re.fullmatch(r"[\w.-]+\.safetensors", x)]:
            raise ValueError(
                f"{folder / INDEX} must name files of safetensors beside it, got {outside[0]!r}"
            )
        missing = [name for name in found if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} must have all files that {INDEX} names, got no {missing[0]}"
            )
        return found
    others = sorted(x.name for x in folder.iterdir() if x.suffix in (".bin", ".pt", ".pth"))
    raise FileNotFoundError(
        f"{folder} must have its weights in {SINGLE} or the files of {INDEX}, got "
        f"{', '.join(others) or 'none'} (save_pretrained of transformers writes them)"
    )


def _stated(path: Path) -> dict[str, Any]:
    """What a JSON file says, whose errors name it."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold names and values, got {found!r:.60}")
    return found


def _checked(folder: Path, files: Sequence[str], theirs) -> torch.dtype:
    """That the weights are those of the model; returns their dtype. Reads headers alone."""
    with torch.device("meta"):
        dense = transformers.AutoModelForCausalLM.from_config(theirs)
    expected = {name: list(x.shape) for name, x in dense.state_dict().items()}
    found: dict[str, tuple[list[int], str]] = {}
    for file in files:
        try:
            with safetensors.safe_open(folder / file, framework="pt") as weights:
                for name in weights.keys():
                    if name in found:
                        raise ValueError(
                            f"{folder}: {name} must stand in one file, got several"
                        )
                    slices = weights.get_slice(name)
                    found[name] = slices.get_shape(), slices.get_dtype()
        except safetensors.SafetensorError as error:
            raise ValueError(f"{folder / file} must be a whole file, got {error}") from None
    for name, (shape, dtype) in found.items():
        if _is_left_out(name, theirs):
            expected.pop(name, None)
            continue
        if name not in expected:
            raise ValueError(f"{folder}: {name} must not be in a {theirs.model_type} model")
        if shape != expected[name]:
            raise ValueError(f"{folder}: {name}: expected shape {expected[name]}, got {shape}")
        if dtype not in DTYPES:
            raise ValueError(f"{folder}: {name} must be of {tuple(DTYPES)}, got {dtype}")
    missing = [x for x in expected if x not in found and not _is_left_out(x, theirs)]
    if missing:
        raise ValueError(f"{folder} must have {missing[0]}, got no such weight")
    if theirs.tie_word_embeddings and HEAD in found:
        _check_tied(folder, files)
    return DTYPES[found[EMBEDDING][1]]


def _check_tied(folder: Path, files: Sequence[str]) -> None:
    """That the head is the embedding: transformers reads another one, and does not tie it."""
    found: dict[str, Tensor] = {}
    for file in files:
        with safetensors.safe_open(folder / file, framework="pt") as weights:
            found |= {x: weights.get_tensor(x) for x in {HEAD, EMBEDDING} & {*weights.keys()}}
    embedding = found[EMBEDDING]
    if not torch.equal(found[HEAD].to(embedding), embedding):
        raise ValueError(
            f"{folder}: {HEAD} must be {EMBEDDING} where tie_word_embeddings is true, got another "
            "one: say tie_word_embeddings=false in config.json"
        )


def _is_left_out(name: str, theirs) -> bool:
    """Whether a weight follows from the rest."""
    tied = name == HEAD and theirs.tie_word_embeddings
    return tied or name.endswith("rotary_emb.inv_freq")


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """That each of its tokens has a row of the embedding."""
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        path = folder / name
        if not path.exists():
            continue
        stated = _stated(path)
        try:
            ids = _ids(stated) if name == "tokenizer.json" else stated.values()
            largest = max(map(int, ids), default=-1)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} must name tokens and their ids, got {error!r}") from None
        if largest >= vocab_size:
            raise ValueError(
                f"{path}: tokens must be below vocab_size={vocab_size}, got {largest}"
            )


def _ids(stated: Mapping[str, Any]) -> list[int]:
    """Of a file of the library tokenizers."""
    vocabulary = stated["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, Mapping) else range(len(vocabulary))
    return [*ids, *(x["id"] for x in stated.get("added_tokens", ()))]


def _write(
    scratch: Path,
    folder: Path,
    files: Sequence[str],
    config: NSAModelConfig,
    start: str,
    dtype: torch.dtype | None,
) -> None:
    """The weights of `files`, a file for each; what is added stands in the last."""
    places: dict[str, str] = {}
    names: set[str] = set()
    size = 0
    for file in files:
        made: dict[str, Tensor] = {}
        for name, x in _read(folder / file, config):
            names.add(name)
            each = converted(name, x, config, start)
            made |= {ours: y.to(dtype or x.dtype) for ours, y in each.items()}
        if file == files[-1]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # of what does not start as a constant
                extra = added(config, names, start)
            made |= {name: x.to(config.dtype) for name, x in extra.items()}
        for name, x in made.items():
            if not x.isfinite().all():
                raise ValueError(f"{name} must be finite in {x.dtype} (start {start!r})")
        safetensors.torch.save_file(made, scratch / file, {"format": "pt"})
        places |= dict.fromkeys(made, file)
        size += sum(x.nbytes for x in made.values())
    if files != [SINGLE]:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (scratch / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read(path: Path, config) -> Iterator[tuple[str, Tensor]]:
    with safetensors.safe_open(path, framework="pt") as weights:
        for name in weights.keys():
            if not _is_left_out(name, config):
                yield name, weights.get_tensor(name)


@torch.no_grad()
def _compare(folder: Path, scratch: Path, count: int, config: NSAModelConfig) -> None:
    """The logits of both models on random tokens, one model at a time."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, count), generator=generator)
    load = transformers.AutoModelForCausalLM.from_pretrained
    dense = load(folder, dtype=config.dtype, use_safetensors=True).float().eval()
    ways = []
    for way in ("eager", "sdpa"):
        dense.set_attn_implementation(way)
        ways.append(dense(tokens, use_cache=False).logits)
    del dense
    ours = load(scratch, dtype=config.dtype).float().eval()
    found = _apart(ours(tokens, use_cache=False).logits, ways[1])
    rounding = torch.finfo(torch.float32).eps * float(ways[1].abs().max())
    limit = TIMES_YARDSTICK * (_apart(*ways) + rounding)
    line = f"logits of {count} tokens are {found:.1e} apart, at most {limit:.1e} expected"
    if not found <= limit:
        raise DifferentError(line)
    print(line)


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be name=value, got {text!r}")
    if name not in SETTABLE:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(SETTABLE)}, got {name!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _numbers(text: str) -> list[int]:
    try:
        return [int(x) for x in text.split(",") if x]
    except ValueError:
        message = f"must be numbers of layers, as 0,1, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where `--check` finds another model; 2 where nothing could be done."""
    parser = argparse.ArgumentParser(
        "python -m nsa_torch.huggingface.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--start", choices=STARTS, default="values")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    what = f"some of {', '.join(SETTABLE)}"
    parser.add_argument("--set", type=_setting, metavar="NAME=VALUE", help=what, **several)
    what = "numbers of layers that keep dense attention, as 0,1"
    parser.add_argument("--dense_layers", type=_numbers, default=[], help=what)
    parser.add_argument("--dtype", choices=WORDS, help="of the weights; default: as they are")
    what = (
        "compares the logits of that many tokens with the dense model's, in float32 on the CPU"
    )
    parser.add_argument("--check", type=int, metavar="TOKENS", help=what)
    given = parser.parse_args(arguments)
    names = [name for name, _ in given.set]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"argument --set: {twice[0]} must be set once")
    try:
        config = convert(
            given.source,
            given.target,
            start=given.start,
            dtype=WORDS.get(given.dtype),
            dense_layers=given.dense_layers,
            check=given.check,
            **dict(given.set),
        )
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DifferentError as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    reach = config.num_selected * config.select_block
    print(f"{given.target}: dense attention up to {reach} tokens, NSA beyond")
    return 0


if __name__ == "__main__":
    sys.exit(main())
