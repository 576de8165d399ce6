"""`moe-engine <command> …`, also as `python -m moe_engine`: finds the command and turns errors into exit codes.

0: done. 1: failed. 2: the user's mistake, told in a message without a traceback. 130: interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from moe_engine import __version__
from moe_engine.config.errors import ConfigError, there_are

# Each is moe_engine.cli.<command>, with SUMMARY, `help_text()` and `run(words) -> exit code`.
COMMANDS = ("train", "convert", "schedule", "plan", "place", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own if None); returns the exit code."""
    from moe_engine.cli import launch

    launch.prepare_rank()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        return launch.report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return launch.report(error)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Our own warnings as a line for the person at the terminal; those of libraries say where they come from."""
    text = f"warning: {message}" if category is UserWarning else f"{filename}:{lineno}: {category.__name__}: {message}"
    print(text, file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help_text())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"moe-engine {__version__}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        known = there_are(COMMANDS, difflib.get_close_matches(command, COMMANDS, n=1))
        raise ConfigError(f"{command}: no such command; {known}; see moe-engine --help")
    module = importlib.import_module(f"moe_engine.cli.{command}")
    if "-h" in rest or "--help" in rest:
        # `bench` has a help for each benchmark.
        print(module.help_of(rest) if hasattr(module, "help_of") else module.help_text())
        return 0
    return int(module.run(rest))


def _help_text() -> str:
    lines = [f"  {name:<10} {importlib.import_module(f'moe_engine.cli.{name}').SUMMARY}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: moe-engine <command> [group=choice …] [section.option=value …]",
            "",
            "A training engine for Mixture-of-Experts language models.",
            "",
            "commands:",
            *lines,
            "",
            "moe-engine <command> --help explains a command; moe-engine --version prints the version.",
            "",
            "example:",
            "  moe-engine train experiment=quickstart",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
