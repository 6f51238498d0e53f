"""Runs `transformers serve`, a server with OpenAI's API, for checkpoints with NSA.

    python -m nsa_torch.huggingface.serve CHECKPOINT --continuous-batching --port 8000
    python -m nsa_torch.huggingface.serve --help

transformers searches for a model's class only among its own classes. This command adds ours and
passes all options to transformers. It needs `transformers[serving]`, and version 5.19 for
`--continuous-batching`. Each page has `select_block` tokens, as in the checkpoint.
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
    """Set `transformers.NSAForCausalLM` to our class, so that the server finds it."""
    model_manager.transformers.NSAForCausalLM = NSAForCausalLM  # type: ignore[attr-defined]


def words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of transformers' command. The first entry of `arguments` is a
    checkpoint or an option.

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
    except (NotImplementedError, OSError) as error:
        sys.exit(f"{error}")
    from transformers.cli.transformers import main as command

    sys.argv = ["transformers", *given]
    command()


if __name__ == "__main__":
    main()
