"""Large contents of uploads beside a database, which keeps their places: in files that are only appended to.

A database writes a large value several times, a segment once. Every process appends to segments of its own; all that
reach the folder read them. What was appended but whose place was not committed is never looked at, and goes with the
segment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Place", "Segments"]

_LOG = logging.getLogger(__name__)
_NAME = 8  # bytes
_VECTOR = 512  # contents that are written at a time; systems allow 1024
_ZEROS = bytes(1 << 20)


class Place(NamedTuple):
    """Where a content is: the name of its segment, its first byte there, and its size."""

    segment: bytes
    at: int
    size: int


class Segments:
    """The segments in a folder, by round.

    Guarantees:
        What `append` gave the places of is on disk.
        What is dropped is overwritten first.
        A symbolic link is never followed: what it leads to is neither read, written nor erased.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._round = 0  # of the segment that is appended to, as are the next three
        self._name = b""
        self._file = -1
        self._end = 0

    def append(self, round: int, contents: Sequence[bytes]) -> list[Place]:
        """Write contents to disk, and return where each of them is; for one thread at a time."""
        if self._file < 0 or self._round != round:
            self._begin_segment(round)
        places = []
        at = self._end
        for content in contents:
            places.append(Place(self._name, at, len(content)))
            at += len(content)
        try:
            _write_contents(self._file, contents)
            os.fdatasync(self._file)
        except BaseException:
            self.close()  # nobody knows where it ends
            raise
        self._end = at
        return places

    def read(self, round: int, places: Iterable[Place]) -> Iterator[bytes]:
        """The contents at these places, one after the other."""
        with contextlib.ExitStack() as stack:
            files: dict[bytes, int] = {}
            for name, at, size in places:
                if name not in files:
                    folder = stack.enter_context(_open_folder(self._segment_path(round)))
                    files[name] = os.open(name.hex(), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
                    stack.callback(os.close, files[name])
                content = os.pread(files[name], size, at)
                if len(content) != size:
                    path = str(self._segment_path(round) / name.hex())
                    raise ValueError(
                        f"{path!r} ends after {len(content)} of the {size} bytes of an upload at {at}: "
                        "restore database and segments from one backup, or wait until the analyzer gives up the round"
                    )
                yield content

    def rounds(self) -> list[int]:
        """The rounds that have segments, in order."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir())
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def drop(self, round: int) -> None:
        """Overwrite and delete the segments of a round; several processes may do so at once."""
        if self._round == round:
            self.close()
        if self._segment_path(round).is_symlink():
            _LOG.warning(
                "%s is a symbolic link: it was removed, and what it points to was left alone", self._segment_path(round)
            )
            self._segment_path(round).unlink(missing_ok=True)
            return
        with contextlib.suppress(FileNotFoundError), _open_folder(self._segment_path(round)) as folder:
            for name in os.listdir(folder):  # noqa: PTH208 - by its descriptor
                with contextlib.suppress(FileNotFoundError):
                    _erase(name, folder)
        with contextlib.suppress(OSError):  # somebody was faster, or still has a file open on a network's volume
            self._segment_path(round).rmdir()

    def close(self) -> None:
        """Close the segment that is appended to."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _begin_segment(self, round: int) -> None:
        self.close()
        folder = self._segment_path(round)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = secrets.token_bytes(_NAME)
        with _open_folder(folder) as inside:
            file = os.open(name.hex(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600, dir_fd=inside)
        for changed in (folder, self._folder, self._folder.parent):
            _sync_folder(changed)
        self._round = round
        self._name = name
        self._file = file
        self._end = 0

    def _segment_path(self, round: int) -> Path:
        return self._folder / str(round)


def _write_contents(file: int, contents: Sequence[bytes]) -> None:
    """Many with one call: Python's lock is let go of and waited for at each."""
    left = [memoryview(content) for content in contents]
    while left:
        done = os.writev(file, left[:_VECTOR])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """A descriptor of a folder; refuses a symbolic link to one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise ValueError(f"{str(folder)!r} is a file or a symbolic link; segments need a folder there") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _erase(name: str, folder: int) -> None:
    """Overwrite and delete a file; of anything else, such as a symbolic link, delete the name alone."""
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        _overwrite_file(os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder))
    else:
        _LOG.warning("%r among the segments is not a file: it was removed, and what it points to was left alone", name)
    os.unlink(name, dir_fd=folder)


def _overwrite_file(descriptor: int) -> None:
    with open(descriptor, "r+b", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            left -= file.write(_ZEROS[:left])
        os.fdatasync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
