"""Streams the documents of a dataset of the Hugging Face Hub.

The library `datasets` streams the files of a split in their order, and retries if the network
fails.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from nsa_core import extras

from . import sources


@dataclasses.dataclass(frozen=True)
class Hub:
    """A split of a dataset at one revision.

    Attributes:
      name: `owner/name` of the dataset.
      config: The configuration of the dataset. `config=None` means its only configuration.
      split: The split of the dataset.
      column: The column of the text.
      revision: A commit or branch of the dataset. `revision=None` means the newest commit.
        `pinned` returns a copy with the commit.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.config}" if self.config else self.name

    def pinned(self) -> "Hub":
        """Return a copy whose revision is the current commit. A later run with the returned copy
        reads the same data.

        Raises:
          ConnectionError: See `take`.
          FileNotFoundError: See `take`.
          ValueError: See `take`.
          ModuleNotFoundError: The extra `data` is not installed.
        """
        # the package datasets requires huggingface_hub
        extras.require("data", "datasets")
        import huggingface_hub

        ask = huggingface_hub.HfApi().dataset_info
        about = self._asked(lambda: ask(self.name, revision=self.revision, timeout=30))
        return dataclasses.replace(self, revision=about.sha)

    def take(self, state: dict[str, Any] | None, count: int) -> tuple[list[str], dict | None]:
        """Return the next `count` documents after `state`, or fewer at the end, and the state
        after the returned documents.

        A state is a position in the form of the library `datasets`. The state None means the
        start.

        Raises:
          ConnectionError: the Hub cannot be reached.
          FileNotFoundError: The Hub has no such dataset, or this account may not read it.
          ValueError: There is no such config, split or column, or the column has values other
            than text.
        """

        def read() -> tuple[list[str], dict[str, Any]]:
            import datasets

            given = {"split": self.split, "revision": self.revision, "streaming": True}
            dataset = datasets.load_dataset(self.name, self.config, **given)
            if state is not None:
                dataset.load_state_dict(state)
            found = []
            for row, example in enumerate(itertools.islice(dataset, count)):
                if self.column not in example:
                    raise sources.no_column(self, self.column, example)
                text = sources.text_of(example[self.column], f"{self} row {row}", self.column)
                found.append(text)
            return found, dataset.state_dict()

        return self._asked(read)

    def _asked[T](self, ask: Callable[[], T]) -> T:
        """Call `ask`, and convert the errors of several libraries to errors of Python."""
        try:
            return ask()
        except Exception as error:
            if isinstance(error, ValueError) and str(self) in str(error):
                raise
            status = getattr(getattr(error, "response", None), "status_code", None)
            first = (str(error).strip().splitlines() or [""])[0]
            text = f"dataset {self}: {type(error).__name__}: {first}"
            if isinstance(error, FileNotFoundError) or status in (401, 403, 404):
                raise FileNotFoundError(
                    f"{text}; pass --dataset a name that exists on the Hub and that this account "
                    "may read, or the path of local files"
                ) from error
            if isinstance(error, ValueError):
                raise ValueError(text) from error
            raise ConnectionError(
                f"{text}; check the network and continue with --resume, or download the files of "
                "the dataset and pass their path as --dataset"
            ) from error
