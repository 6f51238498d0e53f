"""The flags of a run on several devices and of what is watched, and what they say."""

from absl import flags

from ..harness import launchers
from . import watch
from .parallel import KINDS, Parallel
from .ranks import TIMEOUT_S, JaxRanks, Ranks, TorchRanks

COORDINATOR_HELP = (
    "JAX in several processes: address:port of process 0, or auto on a cluster that "
    "jax.distributed knows."
)


class Flags:
    """Defines the flags in `values`, those of a command."""

    def __init__(self, values: flags.FlagValues):
        own = {"flag_values": values}
        self.kind = flags.DEFINE_enum(
            "parallel",
            "none",
            KINDS,
            "ddp: all weights on every device; fsdp: shards of them. torch: by torchrun.",
            **own,
        )
        self.devices = flags.DEFINE_integer(
            "devices",
            None,
            "Devices in all; default: torch's processes, all devices of JAX.",
            lower_bound=1,
            **own,
        )
        self.tensor = flags.DEFINE_integer(
            "tensor", 1, "Devices that share the heads of a row (JAX).", lower_bound=1, **own
        )
        self.accumulate = flags.DEFINE_integer(
            "accumulate", 1, "Micro-batches a step.", lower_bound=1, **own
        )
        self.compile = flags.DEFINE_bool("compile", False, "torch.compile of blocks.", **own)
        self.safe = flags.DEFINE_bool(
            "ddp_safe",
            False,
            "torch: collectives are compared between ranks before they run, and ddp looks for "
            "weights without a gradient, whose memory is their own. Slow; for steps that hang.",
            **own,
        )
        self.timeout_s = flags.DEFINE_float(
            "timeout_s", TIMEOUT_S, "How long processes wait for each other.", **own
        )
        self.coordinator = flags.DEFINE_string("jax_coordinator", None, COORDINATOR_HELP, **own)
        self.processes = flags.DEFINE_integer("jax_processes", None, "How many.", **own)
        self.process = flags.DEFINE_integer("jax_process", None, "Which this is.", **own)
        self.tensorboard = flags.DEFINE_bool(
            "tensorboard", False, "Files for tensorboard in --out (extra tensorboard).", **own
        )
        self.csv = flags.DEFINE_bool(
            "csv", True, "What is watched is rows of <run>.csv in --out too.", **own
        )
        self.heartbeat_s = flags.DEFINE_float(
            "heartbeat_s",
            watch.HEARTBEAT_S,
            "Seconds between lines of heartbeat_rank<r>.jsonl.",
            lower_bound=0,
            **own,
        )
        self.watch_every = flags.DEFINE_integer(
            "watch_every",
            watch.EVERY,
            "Steps between looks at gates and selection.",
            lower_bound=1,
            **own,
        )
        self.hang_s = flags.DEFINE_float(
            "hang_s",
            watch.HANG_S,
            "Seconds without a step after which a process writes its stacks and ends; 0: never.",
            lower_bound=0,
            **own,
        )

    def ranks(self, framework: str) -> Ranks:
        """The processes of this run, which all call it.

        Raises:
          ValueError: what was asked for needs other processes, or one framework, or has no
            effect.
        """
        self._check(framework)
        if self.coordinator.value is not None:
            known = self.processes.value, self.process.value
            return JaxRanks(self.coordinator.value, *known, self.timeout_s.value)
        if framework == "torch" and self.kind.value != "none":
            return TorchRanks(self.timeout_s.value, self.safe.value)
        together = "--parallel=ddp or fsdp"
        if framework == "jax":
            launchers.check_one(f"{together} --jax_coordinator")
        launchers.check_one(f"--framework=torch {together}")
        return Ranks()

    def _check(self, framework: str) -> None:
        """Refuses flags that would mean nothing beside the others."""
        coordinator, spread = self.coordinator.value, self.kind.value != "none"
        if coordinator is not None and framework != "jax":
            raise ValueError(f"--jax_coordinator needs --framework=jax, got {framework}")
        torch_only = {
            "--parallel": coordinator is None and spread and framework == "both",
            "--ddp_safe": self.safe.value and framework == "jax",
            "--compile": self.compile.value and framework == "jax",
        }
        for flag, refused in torch_only.items():
            if refused:
                raise ValueError(f"{flag} needs --framework=torch, got {framework}")
        if not spread and (self.safe.value or coordinator):
            flag = "--ddp_safe" if self.safe.value else "--jax_coordinator"
            raise ValueError(f"{flag} needs --parallel=ddp or fsdp, got none")
        for holder in (self.processes, self.process):
            if holder.value is not None and coordinator is None:
                raise ValueError(f"--{holder.name} needs --jax_coordinator")
            if holder.value is None and coordinator not in (None, "auto"):
                raise ValueError("--jax_coordinator needs --jax_processes and --jax_process")

    def parallel(self, framework: str, among: Ranks) -> Parallel:
        """How a run of `framework` is laid out.

        Raises:
          ValueError: the devices cannot be laid out so.
        """
        devices = self.devices.value
        if devices is None:
            devices = 1 if self.kind.value == "none" else _all(framework, among)
        return Parallel(
            KINDS[KINDS.index(self.kind.value)],
            devices,
            self.tensor.value,
            self.accumulate.value,
            self.compile.value and framework == "torch",
            self.safe.value,
        )

    def watched(self) -> watch.Settings:
        return watch.Settings(
            self.watch_every.value,
            self.tensorboard.value,
            self.csv.value,
            self.heartbeat_s.value,
            self.hang_s.value,
        )


def _all(framework: str, among: Ranks) -> int:
    if framework == "torch":
        return among.size
    import jax

    return jax.device_count()
