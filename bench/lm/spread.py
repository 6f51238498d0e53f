"""Defines the flags for runs on several devices and for observing a run, and evaluates these
flags."""

from typing import Any

from absl import flags

from ..harness import launchers
from . import watch
from .parallel import KINDS, Parallel
from .ranks import TIMEOUT_S, JaxRanks, Ranks, TorchRanks

# Flags in the form that `cli.define` accepts.
DEFINED: dict[str, Any] = dict(
    parallel=(
        "none",
        "Layout of the weights. With ddp, every device has all weights. With fsdp, every device "
        "has a shard of them. In torch, both need torchrun.",
        KINDS,
    ),
    devices=(
        int,
        "Number of devices; default: the processes of torchrun, or all devices of JAX.",
    ),
    tensor=(1, "Number of devices among which the heads of a row are divided (JAX)."),
    accumulate=(1, "Number of micro-batches per step."),
    compile=(False, "Run blocks with torch.compile."),
    ddp_safe=(
        False,
        "In torch, compare collectives between ranks before they run, and with ddp find weights "
        "without a gradient. The flag serves to debug steps that hang, and makes steps slow.",
    ),
    timeout_s=(
        TIMEOUT_S,
        "Maximum number of seconds for which a process waits for other processes.",
    ),
    jax_coordinator=(
        str,
        "Address and port of process 0 if JAX runs in several processes, as address:port. On a "
        "cluster that jax.distributed supports, pass auto.",
    ),
    jax_processes=(int, "Number of JAX processes."),
    jax_process=(int, "Index of this JAX process.", 0),
    tensorboard=(False, "Write files for TensorBoard to --out (extra tensorboard)."),
    csv=(True, "Also write the observed values to <run>.csv in --out."),
    heartbeat_s=(watch.HEARTBEAT_S, "Seconds between lines of heartbeat_rank<r>.jsonl."),
    watch_every=(watch.EVERY, "Steps between observations of gates and selection."),
    hang_s=(
        watch.HANG_S,
        "Seconds without a step after which a process writes its stacks and ends; 0 means never.",
    ),
)


def ranks(given: flags.FlagValues, framework: str) -> Ranks:
    """Return the processes of this run. Every process must call this function.

    Raises:
      ValueError: A flag has no effect with the other flags, or a launcher started several processes
        that would not communicate.
    """
    coordinator, several = given.jax_coordinator, given.parallel != "none"
    known, named = (given.jax_processes, given.jax_process), coordinator is not None
    jax, needs_torch = framework == "jax", f"needs --framework=torch, got {framework}"
    needs_several = "needs --parallel=ddp or fsdp, got none"
    refused = {
        f"--jax_coordinator needs --framework=jax, got {framework}": named and not jax,
        f"--parallel {needs_torch}": several and framework == "both",
        f"--ddp_safe {needs_torch}": given.ddp_safe and jax,
        f"--compile {needs_torch}": given.compile and jax,
        f"--ddp_safe {needs_several}": given.ddp_safe and not several,
        f"--jax_coordinator {needs_several}": named and not several,
        "--jax_processes needs --jax_coordinator": known[0] is not None and not named,
        "--jax_process needs --jax_coordinator": known[1] is not None and not named,
        "--jax_coordinator needs --jax_processes and --jax_process": None in known
        and coordinator not in (None, "auto"),
    }
    for sentence, true in refused.items():
        if true:
            raise ValueError(sentence)
    if named:
        return JaxRanks(coordinator, *known, given.timeout_s)
    if framework == "torch" and several:
        return TorchRanks(given.timeout_s, given.ddp_safe)
    together = "--parallel=ddp or fsdp"
    launchers.check_one(
        f"{together} --jax_coordinator" if jax else f"--framework=torch {together}"
    )
    return Ranks()


def parallel(given: flags.FlagValues, framework: str, among: Ranks) -> Parallel:
    """Return the layout of a run of `framework` with the processes `among`.

    Raises:
      ValueError: The devices do not allow this layout.
    """
    devices = given.devices
    if devices is None and given.parallel == "none":
        devices = 1
    elif devices is None and framework == "torch":
        devices = among.size
    elif devices is None:
        import jax

        devices = jax.device_count()
    compiled = given.compile and framework == "torch"
    return Parallel(
        given.parallel, devices, given.tensor, given.accumulate, compiled, given.ddp_safe
    )


def watched(given: flags.FlagValues) -> watch.Settings:
    return watch.Settings(
        given.watch_every, given.tensorboard, given.csv, given.heartbeat_s, given.hang_s
    )
