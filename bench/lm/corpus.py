"""A pinned corpus that anyone can build again: Python sources of wheels, as tokens.

    python -m bench.lm.corpus --out corpus                        # some minutes, and pip's network
    python -m bench.lm.corpus --out corpus --wheels folder        # of wheels that are at hand
    python -m bench.train --dataset corpus ...

A list (`configs/corpus/python.yaml`) names wheels by version and SHA-256; `pip download` brings
those that are missing in the folder of wheels. Of each wheel the `.py` files within `file_bytes`
are taken in the order of the hash of their names, up to `package_bytes`; equal texts once. Whole
packages are held out. A byte-level BPE (library `tokenizers`) learns `vocabulary` tokens from the
first `tokenizer_bytes` of the training documents, or of those of another list (`learns_from`). The
list says which tokenizer and tokens must come of it: anything else is an error, and nothing is
written.

| file | what |
|---|---|
| `corpus.json` | what the corpus is made of, and the SHA-256 of the two below |
| `tokenizer.json` | as the library `tokenizers` reads it |
| `tokens.xz` | 16-bit tokens, all low bytes, then all high ones; held-out ones last |

Token 0 begins a document.
"""

import dataclasses
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from absl import flags

from nsa_core import config_files, extras

from ..harness import cli, heartbeat, records
from .tokens import TOGETHER, Documents, tokenizer_file

FLAGS = flags.FlagValues()
_own = {"flag_values": FLAGS}
LIST = config_files.FOLDER / "corpus" / "python.yaml"
OUT = flags.DEFINE_string("out", None, "A new folder for the corpus.", **_own)
WHEELS = flags.DEFINE_string(
    "wheels", None, "Folder of wheels, filled by pip where one is missing; default: one that goes.",
    **_own,
)  # fmt: skip
NAMES = flags.DEFINE_string("list", str(LIST), "The list of wheels.", **_own)

ABOUT, TOKENIZER, TOKENS = "corpus.json", "tokenizer.json", "tokens.xz"
BEGIN = "<|document|>"  # token 0
SCHEMA = 1
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Wheels:
    """A list.

    Attributes:
      train, held_out: SHA-256 of the wheel by `name==version`.
      vocabulary, tokenizer_bytes: of the tokenizer; the bytes that it learns from.
      file_bytes: least and most of a file.
      package_bytes: most of a package.
      tokenizer, tokens: the SHA-256 of what comes of it; None: not known yet.
      learns_from: the list whose training documents the tokenizer learns from, named in the file
        by its path from there; None: this one.
    """

    train: Mapping[str, str]
    held_out: Mapping[str, str]
    vocabulary: int
    file_bytes: tuple[int, int]
    package_bytes: int
    tokenizer_bytes: int
    tokenizer: str | None = None
    tokens: str | None = None
    learns_from: "Wheels | None" = None

    @property
    def all(self) -> dict[str, str]:
        return {**self.held_out, **self.train}


def wheels(path: str | Path) -> Wheels:
    """The list in the file at `path`.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it lacks a key, or has one too many, or a value is none; the message names both.
    """
    try:
        found = config_files.parsed(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    fields = {field.name: field for field in dataclasses.fields(Wheels)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not isinstance(found, dict) or not needed <= found.keys() <= fields.keys():
        got = sorted(found) if isinstance(found, dict) else found
        raise ValueError(f"{path} must have the keys {sorted(fields)}, got {got!r:.200}")
    for part in ("train", "held_out"):
        if not isinstance(found[part], dict) or not found[part]:
            raise ValueError(f"{path}: {part} must name wheels, got {found[part]!r:.60}")
        for name, sha256 in found[part].items():
            if "==" not in str(name) or not SHA256.fullmatch(str(sha256)):
                raise ValueError(
                    f"{path}: {part} must be of name==version: SHA-256, got {name!r}: {sha256!r}"
                )
    both = found["train"].keys() & found["held_out"].keys()
    if both:
        raise ValueError(f"{path}: {min(both)} must be of train or of held_out, got both")
    sizes = found["file_bytes"], found["package_bytes"], found["tokenizer_bytes"]
    numbers = [*(sizes[0] if isinstance(sizes[0], list) else [None]), *sizes[1:]]
    if (
        len(numbers) != 4
        or not all(type(x) is int and x > 0 for x in numbers)
        or numbers[0] > numbers[1]
    ):
        raise ValueError(
            f"{path}: file_bytes must be two sizes, the lesser first, package_bytes and "
            f"tokenizer_bytes one each, got {sizes}"
        )
    for part in ("tokenizer", "tokens"):
        sha256 = found.get(part)
        if sha256 is not None and not SHA256.fullmatch(str(sha256)):
            raise ValueError(f"{path}: {part} must be a SHA-256, got {sha256!r}")
    if not isinstance(found["vocabulary"], int) or not 256 < found["vocabulary"] <= 2**16:
        raise ValueError(
            f"{path}: vocabulary must be over the 256 bytes and at most 65536, got "
            f"{found['vocabulary']!r}"
        )
    other = found.get("learns_from")
    if other is not None:
        found["learns_from"] = wheels(Path(path).parent / str(other))
    return Wheels(**found | {"file_bytes": tuple(found["file_bytes"])})


def fetched(names: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """The wheels of `names`, brought by pip into `folder` where they are not there yet.

    Raises:
      ValueError: pip brings no such wheel, or one of another hash.
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
            raise ValueError(f"pip must bring {sorted(missing)}: .. {said}")
        found = _at_hand(names, folder)
    lost = sorted(names.keys() - found.keys())
    if lost:
        raise ValueError(
            f"{folder} must hold {lost[0]} with SHA-256 {names[lost[0]]}, got none"
        )
    return found


def _at_hand(names: Mapping[str, str], folder: Path) -> dict[str, Path]:
    by_sum = {sha256(path.read_bytes()): path for path in sorted(folder.glob("*.whl"))}
    return {name: by_sum[sha256] for name, sha256 in names.items() if sha256 in by_sum}


def documents(path: Path, given: Wheels) -> Iterator[tuple[str, str]]:
    """Name and text of the files of a wheel that are taken.

    Raises:
      ValueError: the file is no wheel.
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
        raise ValueError(f"{path} is no wheel: {error}") from None


def texts(given: Wheels, folder: Path) -> tuple[list[str], list[str]]:
    """The documents for training and those held out, each in the order of the hash of their
    wheel and name. Equal texts count once, held out first."""
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
    """The tokenizer of the first documents."""
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
    """What `corpus.json` says, the tokenizer's file, and the tokens.

    Raises:
      ValueError: they are not what the list says, or no document is left.
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
    begin = np.zeros(1, np.uint16)
    parts: list[list[np.ndarray]] = [[], []]
    for part, group in zip(parts, (train, held_out), strict=True):
        for start in range(0, len(group), TOGETHER):
            for each in tokenizer.encode_batch(group[start : start + TOGETHER]):
                part += [begin, np.array(each.ids, np.uint16)]
    tokens = np.concatenate([x for part in parts for x in part]).astype("<u2")
    _same("tokens", given.tokens, sha256(tokens.tobytes()))
    about = {
        "schema": SCHEMA,
        "wheels": dataclasses.asdict(given),
        "vocabulary": tokenizer.get_vocab_size(),
        "documents": [len(train), len(held_out)],
        "bytes": [sum(len(x.encode()) for x in group) for group in (train, held_out)],
        "tokens": [sum(map(len, part)) for part in parts],
        "sha256": {TOKENIZER: sha256(written), TOKENS: sha256(tokens.tobytes())},
        "versions": records.environment()["versions"],
    }
    return about, written, tokens


def _same(what: str, expected: str | None, got: str) -> None:
    if expected is not None and got != expected:
        raise ValueError(
            f"{what} must have SHA-256 {expected} as the list says, got {got}: another version of "
            "the library tokenizers, or another list"
        )


def write(out: Path, about: Mapping[str, Any], tokenizer: bytes, tokens: np.ndarray) -> None:
    """Writes the three files; `out` is there as a whole or not at all."""
    halves = (tokens & 255).astype(np.uint8).tobytes() + (tokens >> 8).astype(
        np.uint8
    ).tobytes()
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
    """Whether `read` reads it."""
    return (Path(path) / ABOUT).is_file()


def read(folder: str | Path, tokenizer: str | None = None) -> Documents:
    """The corpus in `folder`.

    Args:
      tokenizer: the file that is asked for beside it, which must be the corpus's own.

    Raises:
      ValueError: a file is missing, or not as it was written, or the tokenizer is another.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / ABOUT).read_text())
        if about["schema"] != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {about['schema']}")
        sums, (_, held_out) = about["sha256"], about["tokens"]
        packed = (folder / TOKENS).read_bytes()
        halves = lzma.LZMAFile(io.BytesIO(packed)).read()
    except (OSError, ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{folder} is not a whole corpus: {error}; build it again") from None
    for name, path in ((TOKENIZER, folder / TOKENIZER), (TOKENIZER, tokenizer)):
        if path is None:
            continue
        got = sha256(tokenizer_file(path))
        if got != sums[name]:
            raise ValueError(
                f"tokenizer must be that of the corpus {folder}, with SHA-256 {sums[name]}, got "
                f"{path} with {got}"
            )
    low, high = np.frombuffer(halves, np.uint8).reshape(2, -1).astype(np.uint16)
    tokens = low | high << 8
    if sha256(tokens.astype("<u2").tobytes()) != sums[TOKENS]:
        raise ValueError(
            f"tokens of corpus {folder} must have SHA-256 {sums[TOKENS]}, got others; "
            "build it again"
        )
    starts = np.append(np.flatnonzero(tokens == 0), len(tokens))
    return Documents(
        str(folder), tokens, starts, about["vocabulary"], sums[TOKENS], held_out=held_out
    )


def sha256(data: bytes) -> str:
    """Of the bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def main(argv: Sequence[str]) -> int:
    if OUT.value is None:
        raise ValueError("--out must name the folder of the corpus, got none")
    out = Path(OUT.value)
    if out.exists():
        raise ValueError(f"--out must name a new folder, got {out}, which exists")
    given = wheels(NAMES.value)
    with tempfile.TemporaryDirectory() as scratch:
        about, tokenizer, tokens = build(given, Path(WHEELS.value or scratch))
    write(out, about, tokenizer, tokens)
    train, held_out = about["tokens"]
    print(f"{out}: {train} tokens for training, {held_out} held out")
    for name, sha256 in about["sha256"].items():
        print(f"{name}: SHA-256 {sha256}")
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)
