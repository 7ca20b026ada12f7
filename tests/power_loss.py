"""What a disk may hold after the power failed: every legal remainder of what was done to files.

`Disk` records what this process does to the files below a folder. Promised is as little as POSIX
does, with renames that are atomic: what was written to a file and not synced is lost, there, zero
or torn, each write for itself; a name that was made, moved or removed is as before until its
directory is synced, each for itself, but one name's changes in their order.
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dcp_zarr import commit


class Killed(BaseException):
    """The process is dead: nothing more is done to files."""


@dataclass(frozen=True)
class Names:
    """Names that one act changes: (directory, name, file or None)."""

    changes: tuple


@dataclass(frozen=True)
class Write:
    """Bytes written to a file, or its new size."""

    file: int
    offset: int
    content: bytes | None


@dataclass(frozen=True)
class Sync:
    """All that was done to a file or directory before that act is durable."""

    file: int
    before: int


@dataclass
class Disk:
    """A folder, what was durable in it, and what was done since."""

    root: Path
    acts: list = field(default_factory=list)
    alive: int | None = None
    """So many acts, then this process counts as dead."""

    def __post_init__(self):
        self.root = Path(os.path.realpath(self.root))
        self.names, self.contents = {0: {}}, {}
        self.fds: dict[int, int] = {}
        self._find(self.root, 0)
        self.first = {d: dict(names) for d, names in self.names.items()}

    def _new(self):
        return len(self.names) + len(self.contents)

    def _find(self, folder, number):
        for path in sorted(folder.iterdir()):
            self.names[number][path.name] = found = self._new()
            if path.is_dir():
                self.names[found] = {}
                self._find(path, found)
            else:
                self.contents[found] = path.read_bytes()

    # What is done.

    def act(self, act):
        self.acts.append(act)
        if isinstance(act, Names):
            for directory, name, file in act.changes:
                if file is None:
                    self.names[directory].pop(name, None)
                else:
                    self.names[directory][name] = file

    def place(self, path, dir_fd=None):
        """Return directory and name of a path; None for what is not in the folder."""
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else Path.cwd()
        path = Path(os.path.normpath(Path(base, os.fsdecode(path))))
        if path == self.root:
            return 0, "."
        if self.root not in path.parents:
            return None
        directory = 0
        for part in path.relative_to(self.root).parts[:-1]:
            directory = self.names[directory][part]
        return directory, path.name

    def at(self, place):
        return 0 if place == (0, ".") else self.names[place[0]].get(place[1])

    @contextmanager
    def recorded(self):
        """Record what is done meanwhile."""
        hooks = _Hooks(self)
        real = {name: getattr(os, name) for name in _Hooks.OF_OS}
        real_exchange = commit.exchange
        try:
            for name, function in real.items():
                setattr(os, name, hooks.of(name, function))
            commit.exchange = hooks.of("exchange", real_exchange)
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            commit.exchange = real_exchange

    def found(self, names=None, contents=None):
        """Return what is below the folder: content of each file by path, None for a directory."""
        names, contents = names or self.names, contents or self.all_written(len(self.acts))

        def walk(directory, path):
            for name, file in sorted(names.get(directory, {}).items()):
                yield f"{path}{name}", contents.get(file, b"") if file not in self.names else None
                if file in self.names:
                    yield from walk(file, f"{path}{name}/")

        return dict(walk(0, ""))

    def all_written(self, end):
        contents = {file: bytearray(content) for file, content in self.contents.items()}
        for act in self.acts[:end]:
            if isinstance(act, Write):
                _write(contents, act, act.content)
        return {file: bytes(content) for file, content in contents.items()}

    # What may be left.

    def after_power_loss(self, end, dice):
        """Yield what may be found where the power fails after so many acts."""
        acts = self.acts[:end]
        synced: dict[int, int] = {}
        for act in acts:
            if isinstance(act, Sync):
                synced[act.file] = max(synced.get(act.file, 0), act.before)
        loose = [
            number
            for number, act in enumerate(acts)
            if (isinstance(act, Write) and number >= synced.get(act.file, 0))
            or (
                isinstance(act, Names)
                and all(number >= synced.get(directory, 0) for directory, *_ in act.changes)
            )
        ]
        loose_names = {n for n in loose if isinstance(acts[n], Names)}
        recent = loose[-6:]
        for lost in (
            set(),
            set(loose),
            loose_names,
            set(loose) - loose_names,
            *({n} for n in recent),
            *(set(loose) - {n} for n in recent),
            *({n for n in loose if dice.random() < part} for part in (0.1, 0.5, 0.5, 0.9)),
        ):
            for how in ("lost", "zero", "torn") if lost - loose_names else ("lost",):
                yield self._left(acts, set(loose), lost, how, dice)

    def _left(self, acts, loose, lost, how, dice):
        names = {directory: dict(entries) for directory, entries in self.first.items()}
        contents = {file: bytearray(content) for file, content in self.contents.items()}
        held: set = set()
        for number, act in enumerate(acts):
            if isinstance(act, Names):
                entries = {change[:2] for change in act.changes}
                if number in loose and (number in lost or entries & held):
                    held |= entries
                    continue
                for directory, name, file in act.changes:
                    names.setdefault(directory, {})[name] = file
                    if file is None:
                        del names[directory][name]
            elif isinstance(act, Write):
                content = act.content
                if number in lost:
                    if how == "lost" or content is None:
                        continue
                    keep = 0 if how == "zero" else dice.randrange(len(content) + 1)
                    content = content[:keep] + bytes(len(content) - keep if how == "zero" else 0)
                _write(contents, act, content)
        return self.found(names, {file: bytes(content) for file, content in contents.items()})


def _write(contents, act, content):
    found = contents.setdefault(act.file, bytearray())
    end = act.offset + len(content or b"")
    if len(found) < end:
        found.extend(bytes(end - len(found)))
    if content is None:
        del found[act.offset :]
    else:
        found[act.offset : end] = content


class _Hooks:
    """Take the place of functions that change files: do it, and record it."""

    OF_OS = (
        "open", "mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir", "pwritev",
        "pwrite", "ftruncate", "fsync",
    )  # fmt: skip

    def __init__(self, disk):
        self.disk = disk

    def of(self, name, real):
        hook = getattr(self, name)

        def operation(*args, **kwargs):
            changes = name != "open" or args[1] & os.O_CREAT
            if changes and self.disk.alive is not None and len(self.disk.acts) >= self.disk.alive:
                raise Killed
            return hook(real, *args, **kwargs)

        return operation

    def open(self, real, path, flags, mode=0o777, *, dir_fd=None):
        place = self.disk.place(path, dir_fd)
        fd = real(path, flags, mode, dir_fd=dir_fd)
        self.disk.fds.pop(fd, None)
        if place is not None:
            file = self.disk.at(place)
            if file is None and flags & os.O_CREAT:
                file = self.disk._new()
                self.disk.contents[file] = b""
                self.disk.act(Names(((*place, file),)))
            if file is not None:
                self.disk.fds[fd] = file
        return fd

    def mkdir(self, real, path, mode=0o777, *, dir_fd=None):
        real(path, mode, dir_fd=dir_fd)
        place = self.disk.place(path, dir_fd)
        if place is not None:
            made = self.disk._new()
            self.disk.names[made] = {}
            self.disk.act(Names(((*place, made),)))

    def rename(self, real, old, new, **dir_fds):
        source, target = self.disk.place(old), self.disk.place(new)
        real(old, new, **dir_fds)
        self.disk.act(Names(((*source, None), (*target, self.disk.at(source)))))

    replace = rename

    def exchange(self, real, first, second):
        places = self.disk.place(first), self.disk.place(second)
        done = real(first, second)
        if done:
            one, other = map(self.disk.at, places)
            self.disk.act(Names(((*places[0], other), (*places[1], one))))
        return done

    def link(self, real, old, new, **options):
        real(old, new, **options)
        self.disk.act(Names(((*self.disk.place(new), self.disk.at(self.disk.place(old))),)))

    def unlink(self, real, path, *, dir_fd=None):
        place = self.disk.place(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if place is not None and self.disk.at(place) is not None:
            self.disk.act(Names(((*place, None),)))

    remove = rmdir = unlink

    def pwritev(self, real, fd, buffers, offset):
        written = real(fd, buffers, offset)
        if fd in self.disk.fds:
            content = b"".join(map(bytes, buffers))[:written]
            self.disk.act(Write(self.disk.fds[fd], offset, content))
        return written

    def pwrite(self, real, fd, content, offset):
        return self.pwritev(lambda *_: real(fd, content, offset), fd, [content], offset)

    def ftruncate(self, real, fd, size):
        real(fd, size)
        if fd in self.disk.fds:
            self.disk.act(Write(self.disk.fds[fd], size, None))

    def fsync(self, real, fd):
        before = len(self.disk.acts)
        real(fd)
        if fd in self.disk.fds:
            self.disk.act(Sync(self.disk.fds[fd], before))


def materialise(found, folder):
    """Make files and directories of what was found."""
    for path, content in found.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def left_overs(disk, seed, start=0):
    """Yield (number of acts, what may be found after them), each different remainder once."""
    dice, seen = random.Random(seed), set()
    for end in range(start, len(disk.acts) + 1):
        for found in disk.after_power_loss(end, dice):
            key = hash(tuple(found.items())), end == len(disk.acts)
            if key not in seen:
                seen.add(key)
                yield end, found
