"""Compares FlashAttention-2 with SDPA under a mask, for the sliding and the compressed branch
(torch).

    python -m bench.fa2
    python -m bench.fa2 --S_list=1024,8192,32768 --w_list=512 --path=dense
    python -m bench.fa2 --sliding_kernel=fa2 --log=timing

Each row has these three implementations. All of them are compared with the reference before any
time is measured:

- `masked` is one `scaled_dot_product_attention` with the whole boolean mask `[T, S]`, which is
  built before the time measurement.
- `fa2` is FlashAttention-2. `--path` selects one of two calls: `varlen`, which the library uses
  (`auto`), or `dense`.
- `sdpa` is the portable path of the library, which runs if FA-2 is not faster.

The automatic choice compares `fa2` with `sdpa`. The file of a device also has the lengths from
which `fa2` is faster than `masked`. Since all three implementations are measured at every length,
`--kernels` must be `auto` or `fa2`, and thresholds (`--fa2_min_len_win`) exclude no row. Without
CUDA the command does not measure FA-2, reports this, and ends with status 3.
"""

import functools
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core import flags as kernel_flags
from nsa_core.config import NSAConfig
from nsa_torch import fa2
from nsa_torch.chunks import nothing_seen

from .harness import cli, command, parts, problems
from .harness.command import integers, speed_up
from .harness.jobs import Job
from .harness.records import Record, Values
from .harness.runners import TorchRunner, asked

FLAGS = command.flag_values(
    **parts.FLAGS,
    **{"heads": 8, "groups": 1, "dk": 64, "dv": 64, "l": 32, "d": 16},
    S_list=(list, "Sequence lengths; default: 256,512,1024, or 256,512 without a GPU."),
    w_list=(list, "Window sizes; default: 32,64,128,256, or 32,128 without a GPU."),
    batch=(1, "Sequences."),
    path=(
        "auto",
        "The call of FA-2 that is measured; auto: varlen.",
        ["auto", "varlen", "dense"],
    ),
)


def masked(branch: str, config: NSAConfig):
    """Return attention with a dense mask. The first call of the returned function computes the
    mask."""
    made = functools.cache(functools.partial(_mask, branch, config))

    def call(given):
        query, key, value = (x.transpose(1, 2) for x in _arrays(given))
        seen, empty = made(query.shape[2], key.shape[2], query.device)
        group = query.shape[1] // key.shape[1]
        if group > 1:  # SDPA's kernels with a mask do not support groups
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return {"out": out.masked_fill(empty[:, None], 0).transpose(1, 2)}

    return call


def _mask(branch: str, config: NSAConfig, queries: int, keys: int, device):
    """Return the mask of visible keys `[T, S]`, and whether a query has no keys, `[T]`. The mask
    of a query without keys is True everywhere.
    """
    row = torch.arange(queries, device=device)[:, None]
    column = torch.arange(keys, device=device)
    if branch == "sliding":
        seen = (column <= row) & (column > row - config.window)
    else:
        seen = column * config.compress_stride + config.compress_block - 1 <= row
    # SDPA may return NaN for a row without keys. Such a row therefore attends to all keys here,
    # and its output is set to 0 afterwards.
    empty = ~seen.any(dim=-1)
    return seen | empty[:, None], empty


def _arrays(given: Values) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, keys and values of the sliding or the compressed branch."""
    prefix = "compressed_" if "compressed_key" in given else ""
    return given["query"], given[f"{prefix}key"], given[f"{prefix}value"]


def varlen(branch: str, config: NSAConfig, kv_len: int):
    """Return a call of FA-2 with packed sequences, as in the library."""
    function = getattr(fa2, f"{branch}_attention")
    return lambda given: {"out": function(*_arrays(given), config=config, kv_len=kv_len)[0]}


def dense(branch: str, config: NSAConfig, kv_len: int):
    """Return a call of FA-2 for sequences of one length. The sliding branch has a window, and the
    compressed branch has a batch row per residue class.
    """
    if branch == "sliding":
        return lambda given: {"out": _dense(*_arrays(given), window=config.window - 1)}

    def compressed(query, key, value):
        batch, length = query.shape[:2]
        count, stride = key.shape[1], config.compress_stride
        if count == 0:
            return nothing_seen(query, key, value)[0]
        # Step `t = p - (l - 1)` attends to `t // d + 1` tokens. This is causal attention in each
        # class `t mod d`.
        first = config.compress_block - 1
        steps = F.pad(query[:, first:], (0, 0, 0, 0, 0, count * stride - (length - first)))
        steps = steps.unflatten(1, (count, stride)).transpose(1, 2).flatten(0, 1)
        key, value = (x.repeat_interleave(stride, dim=0) for x in (key, value))
        out = _dense(steps, key, value).unflatten(0, (batch, stride)).transpose(1, 2)
        return F.pad(out.flatten(1, 2)[:, : length - first], (0, 0, 0, 0, first, 0))

    return lambda given: {"out": compressed(*_arrays(given))}


def _dense(query, key, value, window: int = -1):
    """Run causal FA-2 on `[B, T, H, D]` with T = S. A query attends to its own key and the `window`
    keys before its own key. With a `window` of -1, a query attends to all keys before its own.
    """
    width = max(query.shape[-1], value.shape[-1])
    scale, value_width = query.shape[-1] ** -0.5, value.shape[-1]
    arrays = [F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value)]
    if fa2.library().startswith("flash_attn"):
        from flash_attn import flash_attn_func

        reach = window, 0 if window >= 0 else -1
        out = flash_attn_func(*arrays, softmax_scale=scale, causal=True, window_size=reach)
    else:  # sequences of one length have no boundaries
        how: Values = {"causal": window < 0, "window": window, "scale": scale}
        longest = query.shape[1], key.shape[1]
        out, _ = fa2.varlen(*arrays, bounds=(None, None), longest=longest, **how)
    return out[..., :value_width]


def jobs(branch: str, runner, settings) -> Iterator[Job]:
    """Yield the rows `masked`, `fa2` and `sdpa` of one problem."""
    config, length = settings.nsa, settings.runtime.seq_len
    refusal = fa2.why_not(asked(settings, runner)) or ""
    call = CALLS[path()](branch, config, length)
    about = lambda path, kernel: {"extra": {"kernel": kernel, "path": path}}
    portable, mask = "scaled_dot_product_attention", masked(branch, config)
    note = "one call of SDPA with the dense mask"
    yield Job(branch, "masked", function=mask, note=note, **about("masked", portable))
    ours = about(path(), fa2.library())
    yield Job(branch, "fa2", function=call, unsupported=refusal, **ours)
    yield Job(branch, "sdpa", "sdpa", **about("sdpa", portable))


def values(
    masked: Record, fast: Record, library: Record, capability: tuple[int, int] | None
) -> Values:
    """Return the values of a row of the table from its three records."""
    config = masked.config
    sizes = {"l": config["compress_block"], "d": config["compress_stride"]}
    if masked.branch == "sliding":
        sizes = {"w": config["window"]}
    return {
        **{"fa2": fast, "masked": masked, "sdpa": library, "sizes": sizes},
        "speedup": speed_up(masked, fast),
        "sm": "".join(map(str, capability or ())),
        "line": {"size": " ".join(f"{name}={x}" for name, x in sizes.items())},
    }


CALLS = {"varlen": varlen, "dense": dense}


def path() -> str:
    """Return the call of FA-2 that is measured."""
    return "varlen" if FLAGS.path == "auto" else FLAGS.path


def rows(runner, lengths: Sequence[int], windows: Sequence[int]) -> Iterator[parts.Problem]:
    """Yield the rows of the table, which are one branch at one length."""
    gpu, block, stride = runner.platform == "cuda", FLAGS.l, FLAGS.d
    sizes = {"compress_block": block, "compress_stride": stride, "select_block": block}
    configs = [("sliding", NSAConfig(**sizes, window=window)) for window in windows]
    for branch, config in [*configs, ("compressed", NSAConfig(**sizes))]:
        for length in lengths:
            at = command.settings(FLAGS, config, gpu, seq_len=length, batch=FLAGS.batch)
            inputs = functools.partial(problems.make, at, "random", FLAGS.seed)
            calls = functools.partial(jobs, branch, runner, at)
            of = "fa2", runner, at, FLAGS, inputs, calls, command.sampling(FLAGS, gpu)
            yield parts.Problem(*of, branch=branch, mode="forward")


def main(argv: Sequence[str]) -> int:
    if other := set(kernel_flags.named()) - {None, "fa2"}:
        raise ValueError(
            f"--kernels and --<branch>_kernel must be auto or fa2, got {other.pop()}"
        )
    if given := kernel_flags.thresholds().given():
        print(
            f"note: --{' --'.join(given)} has no effect on the rows of bench.fa2",
            file=sys.stderr,
        )
    runner = TorchRunner(FLAGS.device)
    gpu = runner.platform == "cuda"
    lengths = integers("S_list", FLAGS.S_list, (256, 512, 1024) if gpu else (256, 512))
    windows = integers("w_list", FLAGS.w_list, (32, 64, 128, 256) if gpu else (32, 128))
    found = [*rows(runner, lengths, windows)]
    if FLAGS.turn is not None:
        return parts.child(FLAGS, found)
    results = command.Results("fa2", FLAGS)
    print(f"device: {runner.device}; FA-2 of {fa2.library()}, {path()}", flush=True)
    for base, fast, library in parts.measured(FLAGS, "fa2", found, results.folder):
        for record in (base, fast, library):
            results.keep([record], beside=record is not fast)
        results.row(**values(base, fast, library, runner.capability))
    return results.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
