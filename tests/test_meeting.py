"""Ranks that meet through a store before they exchange: threads in place of processes."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tpfused import agreement

ALL = "rank 0", "rank 1", "rank 2"


class Member:
    """One rank's side of a group."""

    def __init__(self, store: dist.Store, rank: int):
        self.store, self.rank = store, rank

    def size(self) -> int:
        return len(ALL)


def new_group(store):
    return [Member(store, rank) for rank in range(len(ALL))]


@contextmanager
def patched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: group.store)
        patch.setattr(dist, "get_rank", lambda group: group.rank)
        patch.setattr(agreement, "exists", lambda group: True)
        patch.setattr(agreement, "_meetings", {})
        yield


def meet(*members: Member, seconds: float = 20.0) -> list[str]:
    """What these ranks of a group are told, each in its thread: nothing where all meet."""

    def come(member):
        _, error = agreement.attempt(agreement.meet, member, "op", seconds)
        return str(error or "")

    with ThreadPoolExecutor(len(ALL)) as threads:
        return list(threads.map(come, members))


def who_is_missed(told: list[str]) -> list[list[str]]:
    return [[rank for rank in ALL if rank in text.partition("not called after")[2]] for text in told]


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    yield dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), -1)


def test_all_meet(store):
    with patched():
        group = new_group(dist.PrefixStore("group", store))
        for _ in range(5):
            assert meet(*group) == ["", "", ""]


def test_a_rank_that_comes_when_the_others_have_given_up(store):
    with patched():
        group = new_group(store)
        for _ in range(2):  # of a first meeting, and of a later one
            assert who_is_missed(meet(group[0], group[2], seconds=0.3)) == [["rank 1"], ["rank 1"]]
            assert who_is_missed(meet(group[1], seconds=0.3)) == [["rank 0", "rank 2"]]
            assert all("rank 0" in missed for missed in who_is_missed(meet(group[1], group[2], seconds=0.3)))
            assert meet(*group) == ["", "", ""]


def test_a_store_that_remembers_a_group_that_is_gone(store):
    with patched():
        meet(*new_group(store))
        group = new_group(store)
        assert who_is_missed(meet(group[0], group[1], seconds=0.3)) == [["rank 2"], ["rank 2"]]
        assert meet(*group) == ["", "", ""]
        again = new_group(store)
        assert meet(*again) == ["", "", ""]
        assert who_is_missed(meet(again[2], seconds=0.3)) == [["rank 0", "rank 1"]]
