"""The flags of a run on several devices and of its observation, and their meanings."""

from absl import flags

from ..harness import cli, launchers
from . import watch
from .parallel import KINDS, Parallel
from .ranks import TIMEOUT_S, JaxRanks, Ranks, TorchRanks

COORDINATOR_HELP = (
    "JAX in several processes: address:port of process 0, or auto on a cluster that "
    "jax.distributed knows."
)


class Flags:
    """Define the flags in the flag values of a command."""

    def __init__(self, values: flags.FlagValues):
        self.given = cli.define(
            values,
            parallel=(
                "none",
                "ddp: all weights on every device; fsdp: shards of them. torch: by torchrun.",
                KINDS,
            ),
            devices=(int, "Devices in all; default: torch's processes, all devices of JAX."),
            tensor=(1, "Devices that share the heads of a row (JAX)."),
            accumulate=(1, "Micro-batches a step."),
            compile=(False, "torch.compile of blocks."),
            ddp_safe=(
                False,
                "torch: collectives are compared between ranks before they run, and ddp looks for "
                "weights without a gradient, whose memory is their own. Slow; for steps that hang.",
            ),
            timeout_s=(TIMEOUT_S, "How long processes wait for each other."),
            jax_coordinator=(str, COORDINATOR_HELP),
            jax_processes=(int, "How many."),
            jax_process=(int, "Which this is.", 0),
            tensorboard=(False, "Files for tensorboard in --out (extra tensorboard)."),
            csv=(True, "What is watched is rows of <run>.csv in --out too."),
            heartbeat_s=(
                watch.HEARTBEAT_S,
                "Seconds between lines of heartbeat_rank<r>.jsonl.",
            ),
            watch_every=(watch.EVERY, "Steps between looks at gates and selection."),
            hang_s=(
                watch.HANG_S,
                "Seconds without a step after which a process writes its stacks and ends; 0: "
                "never.",
            ),
        )

    def ranks(self, framework: str) -> Ranks:
        """Return the processes of this run, which all call it.

        Raises:
          ValueError: A flag needs other processes, or one framework, or has no effect.
        """
        self._check(framework)
        if self.given.jax_coordinator is not None:
            known = self.given.jax_processes, self.given.jax_process
            return JaxRanks(self.given.jax_coordinator, *known, self.given.timeout_s)
        if framework == "torch" and self.given.parallel != "none":
            return TorchRanks(self.given.timeout_s, self.given.ddp_safe)
        together = "--parallel=ddp or fsdp"
        if framework == "jax":
            launchers.check_one(f"{together} --jax_coordinator")
        launchers.check_one(f"--framework=torch {together}")
        return Ranks()

    def _check(self, framework: str) -> None:
        """Refuses flags that have no effect with the others."""
        coordinator, spread = self.given.jax_coordinator, self.given.parallel != "none"
        if coordinator is not None and framework != "jax":
            raise ValueError(f"--jax_coordinator needs --framework=jax, got {framework}")
        torch_only = {
            "--parallel": coordinator is None and spread and framework == "both",
            "--ddp_safe": self.given.ddp_safe and framework == "jax",
            "--compile": self.given.compile and framework == "jax",
        }
        for flag, refused in torch_only.items():
            if refused:
                raise ValueError(f"{flag} needs --framework=torch, got {framework}")
        if not spread and (self.given.ddp_safe or coordinator):
            flag = "--ddp_safe" if self.given.ddp_safe else "--jax_coordinator"
            raise ValueError(f"{flag} needs --parallel=ddp or fsdp, got none")
        for name in ("jax_processes", "jax_process"):
            if self.given[name].value is not None and coordinator is None:
                raise ValueError(f"--{name} needs --jax_coordinator")
            if self.given[name].value is None and coordinator not in (None, "auto"):
                raise ValueError("--jax_coordinator needs --jax_processes and --jax_process")

    def parallel(self, framework: str, among: Ranks) -> Parallel:
        """Return the layout of a run of `framework`. Raises: ValueError: the devices do not allow
        this layout.
        """
        devices = self.given.devices
        if devices is None:
            devices = 1 if self.given.parallel == "none" else _all(framework, among)
        return Parallel(
            KINDS[KINDS.index(self.given.parallel)],
            devices,
            self.given.tensor,
            self.given.accumulate,
            self.given.compile and framework == "torch",
            self.given.ddp_safe,
        )

    def watched(self) -> watch.Settings:
        return watch.Settings(
            self.given.watch_every,
            self.given.tensorboard,
            self.given.csv,
            self.given.heartbeat_s,
            self.given.hang_s,
        )


def _all(framework: str, among: Ranks) -> int:
    if framework == "torch":
        return among.size
    import jax

    return jax.device_count()
