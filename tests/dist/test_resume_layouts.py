"""A checkpoint saved in one layout goes on in any other: the next steps are those of one uninterrupted process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from layout_cases import Case
from layouts import differences, run, truth

BEFORE, AFTER = 2, 3
LAYOUTS = [
    Case(),
    Case(dp=2, ep=2, placement=2),
    Case(pp=2, dp=2, ep=1, schedule="dualpipe"),
    Case(pp=2, dp=4, ep=4, schedule="interleaved_1f1b", virtual_stages=2),
    Case(pp=4, dp=2, ep=2, schedule="zb_h1", stages=("embedding", "3L", "1L+head", "mtp"), recompute="selective"),
]


def goes_on(saver: Case, loader: Case, folder: Path) -> dict[str, float]:
    """Save after BEFORE steps at `saver`, go on for AFTER steps at `loader`; differences from one process."""
    run(replace(saver, steps=BEFORE), save_to=folder)
    return differences(truth(saver), run(replace(loader, steps=AFTER), load_from=folder), first=BEFORE)


@pytest.mark.parametrize(
    ("saver", "loader"), [(LAYOUTS[2], LAYOUTS[1]), (LAYOUTS[1], LAYOUTS[4]), (LAYOUTS[3], LAYOUTS[0])], ids=str
)
def test_checkpoint_goes_on_in_another_layout(saver: Case, loader: Case, tmp_path: Path) -> None:
    saver, loader = replace(saver, tied=True), replace(loader, tied=True)
    assert max(goes_on(saver, loader, tmp_path).values()) < 1e-10


SHARED = [
    Case(cp=2, ep=2, dp=2, payload="latent", model="v3_heads"),
    Case(cp=4, pp=2, ep=2, exchange="ulysses", schedule="zb_h1", model="v3_heads"),
    Case(pp=2, dp=2, ep=2, model="v3_heads"),
]


@pytest.mark.parametrize(("saver", "loader"), [(0, 2), (2, 0)])
def test_checkpoint_goes_on_where_other_ranks_share_sequences(saver: int, loader: int, tmp_path: Path) -> None:
    assert max(goes_on(SHARED[saver], SHARED[loader], tmp_path).values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_checkpoint_goes_on_at_another_exchange(saver: int, loader: int, tmp_path: Path) -> None:
    assert max(goes_on(SHARED[saver], SHARED[loader], tmp_path).values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("loader", LAYOUTS, ids=str)
@pytest.mark.parametrize("saver", LAYOUTS, ids=str)
def test_every_checkpoint_goes_on_in_every_layout(saver: Case, loader: Case, tmp_path: Path) -> None:
    assert max(goes_on(saver, loader, tmp_path).values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), [(1, 2), (2, 4), (3, 0)])
def test_rounded_moments_go_on_in_another_layout(saver: int, loader: int, tmp_path: Path) -> None:
    one, other = (replace(LAYOUTS[place], precision="fp64_moments") for place in (saver, loader))
    assert max(goes_on(one, other, tmp_path).values()) < 1e-10


@pytest.mark.parametrize("placement", [2, 3])
def test_going_on_in_the_same_layout_changes_no_bit(placement: int, tmp_path: Path) -> None:
    """Also with experts that moved before the checkpoint, or move after it by loads counted before and after."""
    case = Case(pp=2, dp=2, ep=2, micro_batch=2, precision="bf16", placement=placement)
    whole = run(case)
    assert any(step["moved"] for step in whole.steps)
    run(replace(case, steps=BEFORE), save_to=tmp_path)
    assert not any(differences(whole, run(replace(case, steps=AFTER), load_from=tmp_path), first=BEFORE).values())
