"""Runs `transformers serve`, a server with the API of OpenAI, for checkpoints with NSA.

    python -m nsa_torch.huggingface.serve CHECKPOINT --continuous-batching --port 8000
    python -m nsa_torch.huggingface.serve --help

The server looks for a model's class only among the classes of transformers.
`nsa_torch.huggingface.serve` adds `NSAForCausalLM` to these classes, and passes all options to
`transformers serve`. The command needs `transformers[serving]`, and at least version 5.19 for
`--continuous-batching`. Each page has the `select_block` tokens of the checkpoint.
"""

import sys
from collections.abc import Sequence

from transformers import AutoConfig
from transformers.cli.serving import model_manager

from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.continuous import check_manager
from nsa_torch.huggingface.model import NSAForCausalLM

BATCHES, PAGE = "--continuous-batching", "--cb-block-size"


def register() -> None:
    """Set `transformers.NSAForCausalLM` to the class of this package, so that the server finds
    the class.
    """
    model_manager.transformers.NSAForCausalLM = NSAForCausalLM  # type: ignore[attr-defined]


def words(arguments: Sequence[str]) -> list[str]:
    """Convert the arguments of this command to arguments of `transformers serve`. The first of
    `arguments` is a checkpoint or an option.

    Raises:
      NotImplementedError: `--continuous-batching` with transformers before 5.19.
      OSError: The checkpoint does not exist.
    """
    given = list(arguments)
    if BATCHES in given:
        check_manager()
        checkpoint = None if given[0].startswith("-") else AutoConfig.from_pretrained(given[0])
        named = any(x.split("=")[0] == PAGE for x in given)
        if isinstance(checkpoint, NSAModelConfig) and not named:
            given += [PAGE, str(checkpoint.select_block)]
    return ["serve", *given]


def main(arguments: Sequence[str] | None = None) -> None:
    register()
    try:
        given = words(sys.argv[1:] if arguments is None else arguments)
        from transformers.cli.transformers import main as command

        sys.argv = ["transformers", *given]
        command()
    except (NotImplementedError, ImportError, OSError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
