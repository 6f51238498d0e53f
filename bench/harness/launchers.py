"""Detects from environment variables whether a launcher started this process as one of several
processes.
"""

import os

# The variables of each launcher for the number of processes and the index of this process. A batch
# script of SLURM also has SLURM_NTASKS, but is one process.
LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}


def check_one(together: str = "") -> None:
    """Raise an error if this process is one of several that do not communicate.

    Args:
      together: The flags that would combine the processes to one run, if the command has such
        flags.

    Raises:
      ValueError: A launcher started several processes.
    """
    for launcher, (size, rank) in LAUNCHERS.items():
        count = os.environ.get(size, "")
        if rank in os.environ and count.isdigit() and int(count) > 1:
            use = f"pass {together}, or " if together else ""
            raise ValueError(
                f"{launcher} started {count} processes ({size}={count}), but each process would do "
                f"all of the work and write the same files; {use}start only one process; if each "
                f"process is a separate run, unset {size}"
            )


def is_first() -> bool:
    """Return whether this is the only process of a run, or the first process that torchrun
    started.
    """
    return os.environ.get("RANK", "0") == "0"
