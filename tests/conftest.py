"""What all tests share: the files of `conf/` do not change under them, so each choice of groups is composed once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
from omegaconf import DictConfig

from moe_engine.config import load as loading


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Hydra takes 0.15 s to compose; the hundreds of commands that tests give choose from a few dozen groups."""
    compose = loading._compose

    @functools.cache
    def composed(command: str, groups: tuple[str, ...]) -> DictConfig:
        return compose(command, list(groups))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_compose", lambda command, groups: copy.deepcopy(composed(command, tuple(groups))))
        yield
