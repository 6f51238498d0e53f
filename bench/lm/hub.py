"""Documents of a dataset of the Hugging Face Hub, read as they are needed.

The library `datasets` streams the files of a split in their order. A network that fails is
tried again with growing pauses, from the last document that came.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from nsa_core import extras

from . import sources

PAUSES_S = (1, 2, 4, 8, 16, 32)  # before the tries after the first
AGAIN = (408, 425, 429)  # HTTP: too slow, too early, too many; besides these the 500s
NETWORK = ("aiohttp", "anyio", "fsspec", "httpcore", "httpx", "requests", "urllib3")


@dataclasses.dataclass(frozen=True)
class Hub:
    """A split of a dataset at one revision.

    Attributes:
      name, config, split, column: as the Hub has them; no `config`: the only one.
      revision: a commit of the dataset; `pinned` finds that of a branch.
      pauses_s: before each further try.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    pauses_s: tuple[float, ...] = dataclasses.field(default=PAUSES_S, repr=False)

    def __str__(self) -> str:
        return f"{self.name}:{self.config}" if self.config else self.name

    def pinned(self) -> "Hub":
        """The same at the commit that its revision is now, so that a later run finds it.

        Raises:
          ConnectionError, FileNotFoundError, ValueError: as `take`.
          ModuleNotFoundError: the extra `data` is not installed.
        """
        extras.require("data", "datasets")  # brings huggingface_hub
        import huggingface_hub

        def ask() -> str | None:
            api = huggingface_hub.HfApi()
            return api.dataset_info(self.name, revision=self.revision, timeout=30).sha

        return dataclasses.replace(self, revision=self._patiently(ask))

    def take(self, state: dict[str, Any] | None, count: int) -> tuple[list[str], dict | None]:
        """The next `count` documents after `state`, fewer at the end, and the state after them.

        A state is what `datasets` says of its position; None: the start.

        Raises:
          ConnectionError: the Hub cannot be reached, after all tries.
          FileNotFoundError: it has no such dataset, or not for this account.
          ValueError: no such config, split or column, or something else than text in it.
        """
        found: list[str] = []

        def go_on() -> dict[str, Any]:
            dataset = self._open()
            if state is not None:
                dataset.load_state_dict(state)
            rows = itertools.islice(self._texts(dataset), len(found), count)
            found.extend(rows)
            return dataset.state_dict()

        # What came before a failure is read again, not kept twice.
        return found, self._patiently(go_on, lambda: len(found))

    def _texts(self, dataset) -> Iterator[str]:
        for row, example in enumerate(dataset):
            if self.column not in example:
                raise ValueError(
                    f"{self} has no column {self.column!r}; its columns are "
                    f"{sorted(example)}: name one with --text_column"
                )
            yield sources.text_of(example[self.column], f"{self} row {row}", self.column)

    def _open(self):
        import datasets

        given = {"split": self.split, "revision": self.revision, "streaming": True}
        return datasets.load_dataset(self.name, self.config, **given)

    def _patiently[T](self, ask: Callable[[], T], done: Callable[[], int] = lambda: 0) -> T:
        """What `ask` gives. Tries start anew where `done` has grown since the last failure."""
        pauses, before = list(self.pauses_s), done()
        while True:
            try:
                return ask()
            except Exception as error:
                if not temporary(error):
                    raise self._refusal(error) from error
                if done() > before:
                    pauses, before = list(self.pauses_s), done()
                if not pauses:
                    raise ConnectionError(
                        f"dataset {self}: the Hugging Face Hub did not answer, "
                        f"{len(self.pauses_s) + 1} tries in {sum(self.pauses_s):.0f} s "
                        f"({_first_line(error)}); check the network and go on with --resume, "
                        "or download files of it and give --dataset their path"
                    ) from error
                pause = pauses.pop(0)
                said = f"dataset {self}: {_first_line(error)}; again in {pause} s"
                print(said, file=sys.stderr)
                time.sleep(pause)

    def _refusal(self, error: Exception) -> Exception:
        """The error to raise for one that another try would not mend."""
        if isinstance(error, ValueError) and str(self) in str(error):
            return error
        text = f"dataset {self}: {_first_line(error)}"
        missing = isinstance(error, FileNotFoundError) or _status(error) in (401, 403, 404)
        if missing:
            text += (
                "; give --dataset a name that the Hub has and this account may read, or the "
                "path of local files"
            )
        return FileNotFoundError(text) if missing else ValueError(text)


def temporary(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    for each in _causes(error):
        status = _status(each)
        if status is not None:
            return status in AGAIN or status >= 500
        if type(each).__module__.partition(".")[0].rstrip("0123456789") in NETWORK:
            return True
        if isinstance(each, ConnectionError | TimeoutError):
            return True
    return isinstance(error, OSError) and not isinstance(
        error, FileNotFoundError | PermissionError
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status of the answer that an error carries."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
