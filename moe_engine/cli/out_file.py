"""The file that `out=` names: looked at before anything is computed, and written whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_engine.config.errors import ConfigError


def problems(out: str, folder: bool = False) -> list[str]:
    """Why nothing can be written to `out`, as a line with a value that works; none where nothing is in the way, or to
    be written.

    folder: whether `out` is a folder to make or to fill, and not a file.
    """
    path = Path(out)
    above = path.absolute().parent
    if not out:
        return []
    try:
        if not above.is_dir():
            return [f"out={out}: there is no folder {path.parent}; make it, or use out={path.name}"]
        if path.is_dir() and not folder:
            return [f"out={out}: is a folder; use out={path / 'out'}{path.suffix}"]
        if path.exists() and not path.is_dir() and folder:
            return [f"out={out}: is a file; name a folder, for example out={out}_new"]
        _try(path if path.is_dir() else above)
    except PermissionError:
        return [_unwritable(out, "no permission")]
    except OSError as error:  # a name too long
        return [_unwritable(out, error.strerror)]
    return []


def above_problem(out: str) -> str | None:
    """Why the folder `out` can neither be written nor made, with all that is missing above it; None where it can.

    That it is a file itself is for the command to tell, with its other mistakes.
    """
    path = Path(out).absolute()
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
    except OSError as error:  # a name too long
        return _unwritable(out, error.strerror)
    if not there.is_dir():
        return None if there == path else f"out={out}: {there} is a file; name a folder, for example out={there}_new"
    try:
        _try(path)
    except PermissionError:
        return _unwritable(out, "no permission")
    except OSError as error:
        return _unwritable(out, error.strerror)
    return None


def _try(folder: Path) -> None:
    """Raises OSError where no file can be put into `folder`, whether it is there or must be made; leaves nothing.

    What rights say is not enough: in /proc a superuser has them all.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    finally:
        for each in missing:
            if each.exists():
                each.rmdir()


def write(out: str, text: str) -> None:
    """Raises ConfigError where the file cannot be written; then nothing is left half-written."""
    path = Path(out)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        if partial.exists():
            partial.unlink()
        raise ConfigError(_unwritable(out, error.strerror)) from None


def _unwritable(out: str, why: str | None) -> str:
    short = f"out{Path(out).suffix}"
    return f"out={out}: cannot be written ({why}); use another, for example out={Path('/tmp') / short}"
