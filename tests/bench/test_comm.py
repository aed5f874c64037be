"""`tpfused bench comm`: what it refuses and lists, right and wrong collectives, whole runs on the CPU."""

import json

import pytest
import torch
import torch.distributed as dist

from tpfused import cli
from tpfused.bench.comm import job, works
from tpfused.bench.comm.cases import Grid, grid, parse_sizes, split_groups, told
from tpfused.bench.comm.job import fits_of, is_bad, put_beside, tell
from tpfused.bench.comm.worker import measure_all
from tpfused.bench.comm.works import Member, build, join_groups
from tpfused.bench.runner import DTYPES
from tpfused.cli.errors import UserError
from tpfused.planning.communication import OPERATIONS, bandwidths
from tpfused.planning.rates import Rates
from tpfused.workers import Worker


def comm(*options):
    return cli.main(["bench", "comm", *options])


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as end:
        comm("--help")
    out = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("nccl-tests", "2 (n - 1) / n", "examples:", "Exit codes:", "--tp", "--sizes", *OPERATIONS):
        assert words in out, words


def test_lists(capsys):
    assert comm("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 * 11 and "all_reduce 1 KiB  (quick)" in lines and "all_to_all 1 GiB" in lines
    assert comm("--list", "--quick", "--op", "broadcast") == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert comm("--cpu", "--list", "--op", "broadcast") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "broadcast 16 MiB  (quick)"


@pytest.mark.parametrize(
    "options, told",
    [
        (["--op", "all_reduc"], "did you mean 'all_reduce'?"),
        (["--sizes", "1K,x"], "'x' is no size such as 64K"),
        (["--sizes", ""], "'' is no size"),
        (["--sizes", "0"], "'0' is no size"),
        (["--sizes", "100G"], "of 64 GiB at most"),
        (["--sizes", "64G", "--gpus", "9999"], "two buffers of 64 GiB on each of 9999 ranks are more than this host's"),
        (["--gpus", "1"], "at least two ranks, not 1"),
        (["--gpus", "-2"], "--gpus must be at least 1, not -2"),
        (["--gpus", "4", "--tp", "3"], "--tp 3 and --dp 1 make 3 ranks, and there are 4"),
        (["--dp", "0"], "--dp must be at least 1"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--case", "3 MiB"], "no case has '3 MiB'"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
    ],
)
def test_refuses(options, told, capsys):
    assert comm("--cpu", *options) == 2
    assert told in capsys.readouterr().err


def test_sizes():
    assert parse_sizes("1K, 2MiB,3g,7,1k") == [7, 1024, 2 * 2**20, 3 * 2**30]
    assert [told(size) for size in (7, 1024, 1536, 2**20, 2**30)] == ["7 B", "1 KiB", "1536 B", "1 MiB", "1 GiB"]


def test_grids():
    assert grid(8, None, None).groups() == {"all": [list(range(8))]}
    assert grid(4, 2, None) == grid(4, None, 2) == Grid(2, 2)
    assert grid(4, 2, 2).groups() == {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    assert grid(4, 4, 1).groups() == {"all": [[0, 1, 2, 3]]}
    with pytest.raises(UserError):
        grid(4, 2, 1)


def test_groups_that_split_layers(monkeypatch):
    """Those of tensor parallelism in a grid; all ranks where there is no grid, or only data parallelism."""
    asked = []
    monkeypatch.setattr(job, "_measure", lambda argument, *rest: asked.append(argument["split"]) or 0)
    for options in (["--tp", "2"], ["--tp", "4"], ["--dp", "4"], []):
        assert comm("--cpu", "--gpus", "4", *options) == 0
    assert asked == [[[0, 1], [2, 3]], *[[[0, 1, 2, 3]]] * 3]
    assert split_groups(8, [1, 4, 2]) == [[0, 1, 2, 3], [4, 5, 6, 7]] and split_groups(1, [1]) is None


@pytest.mark.parametrize("factor", [2, 1.5])
def test_rows_get_their_fit(factor):
    rows = [
        {"op": "all_gather", "group": "all", "ranks": 2, "amount": size, "us": 10 + size * 1e-3}
        for size in (1000, 10_000, 100_000)
    ]
    rows[1]["us"] *= factor
    (fit,) = fits_of(rows)
    put_beside([fit], rows)
    assert rows[1]["fit_us"] < rows[1]["us"] and rows[1]["fit_error"] == pytest.approx(
        rows[1]["fit_us"] / rows[1]["us"] - 1, abs=1e-4
    )
    assert "all_gather, all, 2 ranks: " in tell(fit) and f"{fit.max_error:.0%} at most, of 3 sizes" in tell(fit)
    assert not fits_of(rows[:1])


def check_all(context, sizes):
    """Every collective on each kind of group of a 2 x 2 grid, and on all: right at sizes that divide and others."""
    wrong = []
    for groups in (Grid(context.world // 2, 2).groups(), Grid(1, context.world).groups()):
        members = join_groups(groups, max(sizes), torch.bfloat16, context.device)
        for kind, member in members.items():
            for op in OPERATIONS:
                wrong += [(kind, op, size) for size in sizes if not build(op, size, member).check()]
    return wrong


def check_broken(context):
    """A collective that does nothing, or less, is wrong."""
    member = join_groups(Grid(1, context.world).groups(), 64, torch.float32, context.device)["all"]
    found = []
    for op in OPERATIONS:
        work = build(op, 64, member)
        assert work.check()  # what it leaves must not pass for the result of another
        found.append(works.Work(lambda: None, work.source, work.out, work.given, work.right).check())
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_collectives_on_gpus(workers):
    if workers.world < 2:
        pytest.skip("needs two GPUs")
    assert workers.run(check_all, [1, 10, 64, 1000]) == [[]] * workers.world


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
def test_collectives_are_right(workers):
    assert workers.run(check_all, [1, 10, 64, 1000]) == [[]] * 4


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
def test_what_is_wrong_is_found(workers):
    first, *others = workers.run(check_broken)
    assert first == [False, False, False, True, False]  # the root of a broadcast keeps what it has
    assert others == [[False] * 5] * 3


def measure_grid(context):
    """What the first rank reports of a 2 x 2 grid."""
    told = []
    worker = Worker(context.rank, context.world, context.rank, context.world, None, lambda *event: told.append(event))
    argument = {"cases": grid_cases(), "groups": Grid(2, 2).groups(), "rounds": 2, "dtype": "fp32"}
    measure_all(argument, worker, context.device, DTYPES["fp32"])
    return told


def grid_cases():
    from tpfused.bench.comm.cases import cases

    return cases("all_reduce", [4096, 65536])


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
def test_a_grid(workers):
    first, *others = workers.run(measure_grid)
    assert others == [[]] * 3 and [name for name, _ in first] == ["start", "rows"]
    rows = first[1][1]
    assert [(row["case"], row["variant"]) for row in rows] == [
        ("4 KiB", "tp, 2 ranks"), ("4 KiB", "dp, 2 ranks"), ("64 KiB", "tp, 2 ranks"), ("64 KiB", "dp, 2 ranks"),
    ]  # fmt: skip
    assert all(row["correct"] and row["us"] > 0 and row["ranks"] == 2 for row in rows)


def test_a_whole_run(tmp_path, capsys):
    """Two gloo workers; the file is one that a plan can start from."""
    path, plots = tmp_path / "run.json", tmp_path / "plots"
    options = ["--cpu", "--gpus", "2", "--sizes", "1K,64K", "--rounds", "2", "--dtype", "fp32", "--seed", "3"]
    files = ["--json", str(path), "--csv", str(tmp_path / "run.csv"), "--plot", str(plots)]
    assert comm(*options, *files) == 0, capsys.readouterr()
    found = json.loads(path.read_text())
    meta, rows = found["meta"], found["rows"]
    assert meta["complete"] and meta["gpus"] == 2 and meta["seed"] == 3 and meta["grid"] == {"dp": 1, "tp": 2}
    assert meta["torch"] == torch.__version__ and "settings" in meta and "commit" in meta
    assert [(row["op"], row["case"]) for row in rows] == [
        (op, case) for op in OPERATIONS for case in ("1 KiB", "64 KiB")
    ]
    for row in rows:
        algorithm, bus = bandwidths(row["op"], 2, row["amount"], row["us"])
        assert row["correct"] and row["us"] > 0 and row["rounds"] == 2 and row["calls"] >= 40 and not is_bad(row)
        assert row["algorithm_gbps"] == pytest.approx(algorithm, abs=1e-3)
        assert row["bus_gbps"] == pytest.approx(bus, abs=1e-3) and row["fit_us"] > 0
    rates = Rates.from_dict(meta["rates"])
    assert len(rates.fits) == len(meta["fits"]) == 5 and meta["memory_bytes"] > 2**20
    assert {file.name for file in plots.iterdir()} == {f"comm-{op}.png" for op in OPERATIONS}
    out = capsys.readouterr().out
    assert "bus GB/s" in out and "fit error" in out and "time = latency + size / bandwidth" in out
    assert cli.main(["plan", "--model", "gpt2", "--gpus", "2", "--dtype", "fp32", "--from", str(path)]) == 0


def test_on_one_rank_there_is_nothing_to_move():
    """But it works: a group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        memory = torch.zeros(8), torch.zeros(8)
        member = Member(dist.group.WORLD, 0, 1, memory)
        assert all(build(op, 16, member).check() for op in OPERATIONS)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_on_gpus(tmp_path, capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = tmp_path / "run.json"
    assert comm("--quick", "--gpus", "2", "--json", str(path)) == 0, capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["card"] == torch.cuda.get_device_name()
    assert all(row["correct"] and 0 < row["us"] for row in found["rows"]) and len(found["rows"]) == 25
    assert Rates.from_dict(found["meta"]["rates"]).matmul_tflops > 50
