"""Builds a reproducible corpus of tokens from the Python sources of wheels.

    python -m bench.lm.corpus --out corpus                        # some minutes; pip downloads
    python -m bench.lm.corpus --out corpus --wheels folder        # from wheels in a folder
    python -m bench.train --dataset corpus ...

A list (`configs/corpus/python.yaml`) determines the corpus:

1. The list names wheels by version and SHA-256. `pip download` adds missing wheels to the folder.
2. The `.py` files of each wheel are documents if their size is within `file_bytes`. A wheel
   provides up to `package_bytes` of documents, in the order of the hash of the file names. Equal
   texts are used once.
3. The wheels in `held_out` are the held-out text, and the other wheels are the training text.
4. A byte-level BPE (library `tokenizers`) with `vocabulary` tokens learns from the first
   `tokenizer_bytes` of the training text. With `learns_from`, the BPE learns from the training text
   of another list.

The list also has the SHA-256 of the tokenizer and of the tokens. If the built tokenizer or tokens
have other hashes than the list, the command ends with an error and writes nothing.

| file | content |
|---|---|
| `corpus.json` | the sources of the corpus, and the SHA-256 of the two files below |
| `tokenizer.json` | the tokenizer in the format of the library `tokenizers` |
| `tokens.xz` | all low bytes of the 16-bit tokens, then all high bytes; held-out tokens last |

Token 0 begins a document.
"""

import dataclasses
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from absl import flags
from pydantic import Field

from nsa_core import config_files, extras

from ..harness import cli, heartbeat, records
from .tokens import Documents, FromFile, gathered, tokenizer_file

LIST = config_files.FOLDER / "corpus" / "python.yaml"
FLAGS = cli.define(
    flags.FlagValues(),
    out=(str, "Folder of the corpus, which must not exist."),
    wheels=(
        str,
        "Folder of wheels. pip downloads missing wheels to it. Default: a temporary folder.",
    ),
    list=(str(LIST), "Path of the list of wheels."),
)

ABOUT, TOKENIZER, TOKENS = "corpus.json", "tokenizer.json", "tokens.xz"
BEGIN = "<|document|>"  # token 0
SCHEMA = 1

type Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
type Names = Annotated[dict[Annotated[str, Field(pattern="==")], Sha256], Field(min_length=1)]
type Size = Annotated[int, Field(gt=0)]


@dataclasses.dataclass(frozen=True)
class Wheels:
    """A list of wheels.

    Attributes:
      train: Wheels of the training text: the SHA-256 of each `name==version`.
      held_out: Wheels of the held-out text, as SHA-256 of each `name==version`.
      vocabulary: Size of the tokenizer's vocabulary.
      file_bytes: Minimum and maximum size of a file.
      package_bytes: Maximum number of bytes per wheel.
      tokenizer_bytes: Number of bytes from which the tokenizer learns.
      tokenizer: SHA-256 of the tokenizer; None if the hash is not known yet.
      tokens: SHA-256 of the tokens; None if the hash is not known yet.
      learns_from: The list from whose training text the tokenizer learns. A file names that list by
        a relative path. By default the tokenizer learns from this list itself.

    Raises:
      ValueError: A wheel is in both `train` and `held_out`, or the minimum in `file_bytes` is
        greater than the maximum.
    """

    train: Names
    held_out: Names
    vocabulary: Annotated[int, Field(gt=256, le=2**16)]
    file_bytes: tuple[Size, Size]
    package_bytes: Size
    tokenizer_bytes: Size
    tokenizer: Sha256 | None = None
    tokens: Sha256 | None = None
    learns_from: "Wheels | None" = None

    def __post_init__(self) -> None:
        if both := self.train.keys() & self.held_out.keys():
            raise ValueError(f"{min(both)} must be in train or in held_out, got both")
        if self.file_bytes[0] > self.file_bytes[1]:
            raise ValueError(
                f"file_bytes must be two numbers, the smaller one first, got {self.file_bytes}"
            )

    @property
    def all(self) -> dict[str, str]:
        return {**self.held_out, **self.train}


def wheels(path: str | Path) -> Wheels:
    """Read the list in the file at `path`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a key is missing, unknown or has an invalid value. The error message names the
        file and the key.
    """
    return config_files.build(Wheels, _with_others(Path(path)), str(path))


def _with_others(path: Path) -> dict[str, Any]:
    found = config_files.load(path)
    if other := found.get("learns_from"):
        found["learns_from"] = _with_others(path.parent / str(other))
    return found


def fetched(names: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Return the files of the wheels `names`. pip downloads missing wheels into `folder`.

    Raises:
      ValueError: pip finds no such wheel, or finds a wheel with another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _at_hand(names, folder)
    missing = {name: sha256 for name, sha256 in names.items() if name not in found}
    if missing:
        lines = [f"{name} --hash=sha256:{sha256}\n" for name, sha256 in missing.items()]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.writelines(lines)
            file.flush()
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
            command += ["--only-binary", ":all:", "--platform", "any", "--dest", str(folder)]
            done = subprocess.run(
                [*command, "--python-version", "3.12", "-r", file.name],
                capture_output=True,
                text=True,
            )
        if done.returncode:
            said = " ".join(done.stderr.split())[-400:]
            raise ValueError(f"pip must download {sorted(missing)}, got an error: .. {said}")
        found = _at_hand(names, folder)
    return found


def _at_hand(names: Mapping[str, str], folder: Path) -> dict[str, Path]:
    by_sum = {sha256(path.read_bytes()): path for path in sorted(folder.glob("*.whl"))}
    return {name: by_sum[sha256] for name, sha256 in names.items() if sha256 in by_sum}


def documents(path: Path, given: Wheels) -> Iterator[tuple[str, str]]:
    """Yield name and text of the selected files of the wheel at `path`.

    Raises:
      ValueError: The file is no wheel.
    """
    least, most = given.file_bytes
    left = given.package_bytes
    try:
        with zipfile.ZipFile(path) as wheel:
            infos = [x for x in wheel.infolist() if PurePosixPath(x.filename).suffix == ".py"]
            for info in sorted(infos, key=lambda x: sha256(x.filename.encode())):
                if not least <= info.file_size <= min(most, left):
                    continue
                try:
                    text = wheel.read(info).decode()
                except UnicodeDecodeError:
                    continue
                left -= info.file_size
                yield info.filename, text
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a wheel: {error}") from None


def texts(given: Wheels, folder: Path) -> tuple[list[str], list[str]]:
    """Return the documents for training, and the held-out documents. All documents are in the
    order of the hash of their wheel and name. Equal texts are used once. A text that is held out
    is not used for training.
    """
    found, seen = fetched(given.all, folder), set()
    parts: list[list[str]] = []
    for names in (given.held_out, given.train):
        kept = []
        for name in names:
            for file, text in documents(found[name], given):
                digest = sha256(text.encode())
                if digest not in seen:
                    seen.add(digest)
                    kept.append((sha256(f"{name}/{file}".encode()), text))
        parts.append([text for _, text in sorted(kept)])
    held_out, train = parts
    return train, held_out


def learned(train: Sequence[str], given: Wheels) -> Any:
    """Train the tokenizer on the first `tokenizer_bytes` of the documents."""
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise extras.missing("data", error) from error
    sample, size = [], 0
    for text in train:
        if size >= given.tokenizer_bytes:
            break
        sample.append(text)
        size += len(text.encode())
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=given.vocabulary,
        special_tokens=[BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def build(given: Wheels, folder: Path) -> tuple[dict[str, Any], bytes, np.ndarray]:
    """Build the contents of `corpus.json`, the file of the tokenizer, and the tokens.

    Raises:
      ValueError: The hashes differ from the hashes in the list, or no document is left.
    """
    train, held_out = texts(given, folder)
    if not train or not held_out:
        raise ValueError(
            f"train and held_out must each have a document, got {len(train)} and {len(held_out)}"
        )
    heartbeat.say(f"{len(train)} documents, {len(held_out)} held out")
    other = given.learns_from
    tokenizer = learned(train if other is None else texts(other, folder)[0], given)
    written = tokenizer.to_str(pretty=True).encode()
    _same("tokenizer", given.tokenizer, sha256(written))
    by = FromFile(written, TOKENIZER)
    found = (gathered(ABOUT, texts, by) for texts in (train, held_out))
    parts = [np.insert(x.tokens, x.starts[:-1], 0) for x in found]
    tokens = np.concatenate(parts).astype("<u2")
    _same("tokens", given.tokens, sha256(tokens.tobytes()))
    about = {
        "schema": SCHEMA,
        "wheels": dataclasses.asdict(given),
        "vocabulary": by.vocabulary,
        "documents": [len(train), len(held_out)],
        "bytes": [sum(len(x.encode()) for x in group) for group in (train, held_out)],
        "tokens": [*map(len, parts)],
        "sha256": {TOKENIZER: sha256(written), TOKENS: sha256(tokens.tobytes())},
        "versions": records.environment()["versions"],
    }
    return about, written, tokens


def _same(what: str, expected: str | None, got: str) -> None:
    if expected is not None and got != expected:
        raise ValueError(
            f"{what} must have SHA-256 {expected} as in the list, got {got}; the list or the "
            "version of the library tokenizers differs"
        )


def write(out: Path, about: Mapping[str, Any], tokenizer: bytes, tokens: np.ndarray) -> None:
    """Write the three files to the new folder `out`. If an error occurs, `out` is not created."""
    halves = tokens.view(np.uint8).reshape(-1, 2).T.tobytes()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".", dir=out.parent))
    try:
        (scratch / TOKENS).write_bytes(lzma.compress(halves, preset=1))
        (scratch / TOKENIZER).write_bytes(tokenizer)
        (scratch / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        scratch.chmod(0o755)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def is_corpus(path: str | Path) -> bool:
    """Return whether the folder has a corpus that the function `read` can read."""
    return (Path(path) / ABOUT).is_file()


def read(folder: str | Path, tokenizer: str | None = None) -> Documents:
    """Return the corpus in `folder`.

    Args:
      tokenizer: A file that must equal the tokenizer of the corpus.

    Raises:
      ValueError: A file is missing or has changed, or the tokenizer differs.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / ABOUT).read_text())
        if about["schema"] != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {about['schema']}")
        sums, (_, held_out) = about["sha256"], about["tokens"]
        halves = lzma.decompress((folder / TOKENS).read_bytes())
    except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise ValueError(
            f"{folder} is not a complete corpus: {error}; build the corpus again"
        ) from None
    for name, path in ((TOKENIZER, folder / TOKENIZER), (TOKENIZER, tokenizer)):
        if path is None:
            continue
        got = sha256(tokenizer_file(path))
        if got != sums[name]:
            raise ValueError(
                f"tokenizer must be the tokenizer of the corpus {folder} with SHA-256 "
                f"{sums[name]}, got {path} with SHA-256 {got}"
            )
    pairs = np.frombuffer(halves, np.uint8).reshape(2, -1).T
    tokens = np.frombuffer(pairs.tobytes(), "<u2")
    if sha256(tokens.tobytes()) != sums[TOKENS]:
        raise ValueError(
            f"tokens of corpus {folder} must have SHA-256 {sums[TOKENS]}, got other tokens; "
            "build the corpus again"
        )
    starts = np.append(np.flatnonzero(tokens == 0), len(tokens))
    return Documents(
        str(folder), tokens, starts, about["vocabulary"], sums[TOKENS], held_out=held_out
    )


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def main(argv: Sequence[str]) -> int:
    if FLAGS.out is None:
        raise ValueError("--out must name the folder of the corpus, got none")
    out = Path(FLAGS.out)
    if out.exists():
        raise ValueError(f"--out must name a new folder, got an existing folder {out}")
    given = wheels(FLAGS.list)
    with tempfile.TemporaryDirectory() as scratch:
        about, tokenizer, tokens = build(given, Path(FLAGS.wheels or scratch))
    write(out, about, tokenizer, tokens)
    train, held_out = about["tokens"]
    print(f"{out}: {train} tokens for training, {held_out} held out")
    for name, sha256 in about["sha256"].items():
        print(f"{name}: SHA-256 {sha256}")
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)
