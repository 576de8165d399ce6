"""Ranges: what is stored is joined, checked, and cut anew for whoever loads."""

from __future__ import annotations

import pytest
import torch

from moe_engine.checkpoint.reshard import Entry, Part, Range, merge, mismatches, parts_of, plan
from moe_engine.optim.zero import Shard


def stored(*cuts: int, file: str = "f") -> Entry:
    ranges = [Range(f"{file}{i}", a, b, 0) for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))]
    return Entry((cuts[-1],), "float32", tuple(ranges))


def one(start: int, end: int, numel: int = 10, dtype: str = "float32") -> tuple[str, Entry]:
    return "master/a", Entry((numel,), dtype, (Range("f", start, end, 0),))


def part(key: str, start: int, end: int, shape: tuple[int, ...] = (10,)) -> Part:
    return Part(key, shape, start, end, torch.zeros(end - start))


def test_each_state_of_a_shard_and_each_extra_is_a_part() -> None:
    shard = Shard("a", 2, 5, torch.Size([2, 4]), {"master": torch.ones(3), "exp_avg": torch.zeros(3)})
    extra = torch.arange(4.0).view(2, 2)
    parts = {each.key: each for each in parts_of([shard], {"bias": extra})}
    assert parts.keys() == {"master/a", "exp_avg/a", "buffer/bias"}
    assert (parts["master/a"].start, parts["master/a"].end, parts["master/a"].shape) == (2, 5, (2, 4))
    parts["buffer/bias"].values[3] = 9.0
    assert extra[1, 1] == 9.0  # a view: filling a part fills the tensor


def test_ranges_of_all_ranks_are_joined_in_order() -> None:
    merged = merge([one(6, 10), one(0, 2), one(2, 6)])
    assert [(each.start, each.end) for each in merged["master/a"].ranges] == [(0, 2), (2, 6), (6, 10)]


@pytest.mark.parametrize(
    "ranges",
    [[one(0, 9)], [one(1, 10)], [one(0, 4), one(5, 10)], [one(0, 6), one(5, 10)], [one(0, 10), one(0, 10)]],
    ids=["end", "start", "gap", "overlap", "twice"],
)
def test_tensor_that_is_not_stored_exactly_once_is_refused(ranges: list[tuple[str, Entry]]) -> None:
    with pytest.raises(ValueError, match="master/a"):
        merge(ranges)


def test_ranks_that_disagree_on_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="disagree"):
        merge([one(0, 5), one(5, 11, numel=11)])
    with pytest.raises(ValueError, match="disagree"):
        merge([one(0, 5), one(5, 10, dtype="float64")])


def test_mismatches_name_what_is_missing_or_different() -> None:
    entries = {"master/a": stored(0, 10)}
    found = mismatches(entries, [part("master/a", 0, 3), part("master/b", 0, 1), part("master/a", 0, 2, shape=(5, 2))])
    assert found == ["master/b is missing", "master/a has shape [10] where the model has [5, 2]"]
    double = Part("master/a", (10,), 0, 10, torch.zeros(10, dtype=torch.float64))
    assert mismatches(entries, [double]) == ["master/a is float32 where this run has float64"]


@pytest.mark.parametrize("cuts", [(0, 10), (0, 1, 10), (0, 3, 4, 7, 10), (0, 5, 9, 10)])
def test_any_range_is_filled_from_any_cut(cuts: tuple[int, ...]) -> None:
    content = torch.arange(10.0)
    entries = {"master/a": stored(*cuts)}
    for start in range(10):
        for end in range(start + 1, 11):
            wanted = Part("master/a", (10,), start, end, torch.full((end - start,), -1.0))
            for file, copies in plan(entries, [wanted]).items():
                for copy in copies:
                    assert copy.stored.file == file
                    values = content[copy.stored.start : copy.stored.end]
                    copy.target.copy_(values[copy.skip : copy.skip + copy.target.numel()])
            assert torch.equal(wanted.values, content[start:end])


def test_files_without_a_wanted_element_are_not_read() -> None:
    assert plan({"master/a": stored(0, 3, 6, 10)}, [part("master/a", 3, 6)]).keys() == {"f1"}


def test_entry_survives_json() -> None:
    entry = stored(0, 3, 10)
    assert Entry.from_json(entry.to_json()) == entry
