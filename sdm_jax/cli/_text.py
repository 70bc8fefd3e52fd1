"""Text to train on: reading, splitting, tokens, drawing batches, and the order-1 model to compare with."""

from __future__ import annotations

import dataclasses
import importlib
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sdm_jax.cli._errors import CommandError

_EVERY = 20  # one file in so many, or else the last of so many parts, is for validation
_INSTALLED = ("site-packages", "dist-packages")


@dataclasses.dataclass(frozen=True)
class Text:
    """Text to train on and text to validate on.

    Attributes:
        source: where it is from, for people.
        train: its tokens: bytes as uint8, or those of a tokenizer as int32.
        validation: the same of the text to validate on.
        train_bytes: its length in bytes.
        validation_bytes: the same of the text to validate on.
        fingerprint: a checksum of all of it.
    """

    source: str
    train: np.ndarray
    validation: np.ndarray
    train_bytes: int
    validation_bytes: int
    fingerprint: int


def load_tokenizer(name: str) -> tuple[Any, int]:
    """A tokenizer and how many tokens it has: `"bytes"`, or `"module:object"`, which is imported.

    Raises:
        CommandError: there is none of that name, or it does not say how many tokens it has.
    """
    if name == "bytes":
        from sdm_jax.flax import ByteTokenizer

        return ByteTokenizer(), ByteTokenizer.vocab_size
    module, _, path = name.partition(":")
    try:
        tokenizer: Any = importlib.import_module(module)
        for part in path.split("."):
            tokenizer = getattr(tokenizer, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"--tokenizer {name}: must be 'bytes' or 'module:object' ({error})") from None
    sizes = (getattr(tokenizer, attribute, None) for attribute in ("vocab_size", "n_vocab", "get_vocab_size"))
    size = next((size for size in sizes if size is not None), None)
    size = size() if callable(size) else size
    if not isinstance(size, int) or not callable(getattr(tokenizer, "encode", None)):
        raise CommandError(f"--tokenizer {name}: the object must have encode, decode, and vocab_size, an integer")
    return tokenizer, size


def read_text(path: str | None, tokenizer: Any = None, vocab_size: int = 256) -> Text:
    """Reads a file, all text files of a folder, or (None) the Python sources of the standard library.

    Without a tokenizer the tokens are the bytes; one must give integers in `[0, vocab_size)`.

    Files come in the order of their paths; hidden files and files with NUL bytes are left out. Every 20th
    file of a folder is for validation; where these are too few or too short, and for a single file, it
    is the last twentieth of the text.

    Raises:
        CommandError: there is nothing to read, it cannot be read, or the tokenizer gives other tokens.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _split(f"the standard library in {root}", _read_files(root, _sources(root)), tokenizer, vocab_size)
    root = Path(path)
    if not root.exists():
        raise CommandError(f"--data {path}: there is no such file or folder")
    files = _read_files(root, [root] if root.is_file() else _text_files(root))
    if not any(map(len, files)):
        raise CommandError(
            f"--data {path}: "
            + ("the file is empty or not text (has NUL bytes)" if root.is_file() else "found no text in it")
        )
    return _split(str(root), files, tokenizer, vocab_size)


def _sources(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.py") if not set(path.relative_to(root).parts) & set(_INSTALLED)]


def _text_files(root: Path) -> list[Path]:
    return [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]


def _read_files(root: Path, paths: list[Path]) -> list[bytes]:
    files = []
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error.strerror}") from None
        if b"\0" not in content:
            files.append(content)
    return files


def _split(source: str, files: list[bytes], tokenizer: Any, vocab_size: int) -> Text:
    validation = b"".join(files[_EVERY - 1 :: _EVERY])
    train = b"".join(content for i, content in enumerate(files) if i % _EVERY != _EVERY - 1)
    if len(validation) * 5 * _EVERY < len(train):
        whole = b"".join(files)
        cut = len(whole) - len(whole) // _EVERY
        train, validation = whole[:cut], whole[cut:]
    fingerprint = zlib.crc32(validation, zlib.crc32(train))
    return Text(
        source=source,
        train=_tokens(train, tokenizer, vocab_size),
        validation=_tokens(validation, tokenizer, vocab_size),
        train_bytes=len(train),
        validation_bytes=len(validation),
        fingerprint=fingerprint,
    )


def _tokens(text: bytes, tokenizer: Any, vocab_size: int) -> np.ndarray:
    if tokenizer is None:
        return np.frombuffer(text, np.uint8)
    from sdm_jax.flax.generation import token_ids

    needed = f"--tokenizer: its tokens must be a list of integers from 0 to vocab_size - 1, {vocab_size - 1}"
    ids = token_ids(tokenizer, text.decode(errors="replace"))
    try:
        tokens = np.asarray(ids)
    except ValueError as error:  # lists of several lengths
        raise CommandError(f"{needed}: {error}") from None
    if not tokens.size:
        return np.zeros(0, np.int32)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise CommandError(f"{needed}, got {tokens.ndim} dimensions of {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise CommandError(f"{needed}, got tokens from {tokens.min()} to {tokens.max()}")
    return tokens.astype(np.int32)


def draw_batch(text: np.ndarray, batch_size: int, length: int, seed: int, step: int) -> np.ndarray:
    """`[batch_size, length]` int32 pieces of the text, a function of the seed and the step alone."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - length + 1, batch_size)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def validation_batches(text: np.ndarray, batch_size: int, length: int, num_tokens: int) -> Iterator[np.ndarray]:
    """Evenly spaced pieces of the text, `[n, length]` int32 with one `n <= batch_size`.

    Each piece predicts its last `length - 1` tokens; together they predict about `num_tokens`.
    """
    available = (len(text) - 1) // (length - 1)
    pieces = max(1, min(available, num_tokens // (length - 1)))
    n = min(batch_size, pieces)
    starts = np.linspace(0, len(text) - length, pieces // n * n).astype(np.int64)
    for chosen in starts.reshape(-1, n):
        yield text[chosen[:, None] + np.arange(length)].astype(np.int32)


class ByteBigram:
    """The order-1 model: the next byte given the last one, counted on a text.

    Counts are smoothed towards the frequencies of single bytes, and those towards the uniform distribution,
    each as if one more byte had been seen.
    """

    def __init__(self, text: np.ndarray):
        counts = np.zeros(256 * 256, np.int64)
        for start in range(0, len(text) - 1, 2**22):  # in parts: the pairs take more room than the text
            part = text[start : start + 2**22 + 1].astype(np.int32)
            counts += np.bincount(part[:-1] * 256 + part[1:], minlength=counts.size)
        pairs = counts.reshape(256, 256)
        single = (np.bincount(text, minlength=256) + 1 / 256) / (len(text) + 1)
        self._bits = -np.log2((pairs + single) / (pairs.sum(1, keepdims=True) + 1))

    def bits_per_byte(self, pieces: Iterable[np.ndarray]) -> float:
        """Mean bits of the bytes after the first of each piece, `[..., length]`."""
        bits = [self._bits[piece[:, :-1], piece[:, 1:]] for piece in pieces]
        return float(np.mean(bits))
