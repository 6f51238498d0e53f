"""Times the tiles that kernels can have, and writes the winners to `configs/tiles/`.

    python -m bench.tune_tiles
    python -m bench.tune_tiles --config paper --kernel sliding --out /tmp/tiles
    python -m bench.tune_tiles --implementation triton --kernel triton_selected_dkv

Mosaic's kernels run in JAX, Triton's in torch, each pass of a branch by itself; both frameworks
read the table.

One table a device, one entry a kernel and shape: dtype, heads of a group, widths, lengths as
powers of two, and what of NSAConfig the kernel depends on. An entry is written where the best
variant saves more than 2 % of the heuristic's time twice, and taken out where none does. The
exit status is 1 when a variant gives another result than the heuristic.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from kernels_pallas.mosaic import capability as mosaic
from kernels_pallas.triton import capability as triton
from nsa_core import config_files, tiles

from .harness import cli, problems, records
from .harness.runners import JaxRunner, TorchRunner, problem
from .tuners import tile_search, triton_tiles

CONFIG = flags.DEFINE_multi_string(
    "config", ["paper", "seed", "smallgroup"], "Names of files in configs/ or paths."
)
flags.DEFINE_alias("preset", "config")
IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", "mosaic", ["mosaic", "triton"], "Whose kernels."
)
KERNELS = flags.DEFINE_multi_enum(
    "kernel", [], list(tiles.KNOWN), "Only these kernels (repeatable); default: all."
)
INPUT = flags.DEFINE_enum("input", "random", ["random", "text"], "Where the arrays come from.")
SEQ_LEN = flags.DEFINE_integer(
    "seq_len", None, "Tokens, instead of the config's: a power of two.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Of the random arrays and of the text model.")
SECONDS = flags.DEFINE_float(
    "row_seconds", 0.3, "Time spent on samples of a variant.", lower_bound=0
)
OUT = flags.DEFINE_string("out", None, "Folder of the table; default: configs/tiles.")
COMMIT = cli.define_commit()
TITLES = "| kernel | tiles | ms | beside the heuristic |\n|---|---|---|---|"


def table(kernel: str, outcome: tile_search.Outcome) -> str:
    """Rows of Markdown, one a variant, the heuristic first."""
    lines, base = [], outcome.heuristic.time_ms or 0.0
    for trial in outcome.trials:
        chosen = " ".join(f"{name}={value}" for name, value in trial.tiles.items())
        cells = [kernel, chosen, "-", trial.reason]
        if trial.time_ms is not None:
            cells[2:] = f"{trial.time_ms:.4g}", f"{trial.time_ms / base - 1:+.1%}"
        if trial is outcome.heuristic:
            cells[3] = "heuristic"
        if trial is outcome.winner:
            cells[3] += f", wins by {outcome.gain:.1%}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    mosaics = IMPLEMENTATION.value == "mosaic"
    known = tiles.TUNABLE if mosaics else tiles.TRITON
    names = list(dict.fromkeys(KERNELS.value)) or list(known)
    if unknown := [name for name in names if name not in known]:
        raise app.UsageError(
            f"kernel must be one of {IMPLEMENTATION.value}'s, {list(known)}, got {unknown}"
        )
    runner = JaxRunner() if mosaics else TorchRunner()
    given = {} if SEQ_LEN.value is None else {"seq_len": SEQ_LEN.value}
    settings = [problems.settings(name, given) for name in CONFIG.value]
    for each in settings:
        length = each.runtime.seq_len
        if length & (length - 1):
            raise app.UsageError(
                f"an entry is for all lengths up to a power of two, seq_len is {length}"
            )
        asked = problem(each, runner.framework, runner.platform, runner.capability)
        if reason := (mosaic if mosaics else triton).why_not(asked):
            raise NotImplementedError(f"{IMPLEMENTATION.value}: {reason}")
    folder = Path(OUT.value) if OUT.value else tiles.FOLDER
    path = folder / f"{config_files.slug(runner.device)}.json"
    environment, wrong, count = records.environment(COMMIT.value), False, 0
    for name, each in zip(CONFIG.value, settings, strict=True):
        inputs = problems.make(each, INPUT.value, SEED.value)
        made = (tile_search if mosaics else triton_tiles).Kernels
        kernels: tile_search.Tunable = made(each, inputs, runner, SECONDS.value)
        print(f"\n{name}: {each.runtime}\n\n{TITLES}", flush=True)
        for kernel in names:
            outcome = tile_search.tune(
                kernels.heuristic(kernel),
                kernels.variants(kernel),
                lambda chosen, kernels=kernels, kernel=kernel: kernels.prepare(kernel, chosen),
                tile_search.differs,
            )
            print(table(kernel, outcome), flush=True)
            wrong = wrong or any(trial.wrong for trial in outcome.trials)
            found = []
            if outcome.winner is not None:
                found.append(tile_search.entry(kernels, kernel, outcome, environment))
            # At once: what was measured is kept whatever happens to the next.
            count = tile_search.write(path, runner.device, [kernels.shape(kernel)], found)
    print(f"\n{count} entries in {path}" if count else "\nno variant gains enough; no table")
    return int(wrong)


if __name__ == "__main__":
    cli.run(main)
