"""`tpfused plan`: what a model costs at each degree of parallelism, before it is run.

Arithmetic, without torch: `shape.py` counts parameters, `work.py` has the kinds of work, `block.py` what one rank does,
`memory.py` what it holds, `communication.py` what collectives cost, `rates.py` how fast a machine is, `time.py` what
work takes and `layouts.py` a step of each layout. `options.py`, `job.py` and `report.py` are the command, measuring
by `tpfused.bench.comm`; `check.py` is `--check`, for which `worker.py` runs blocks.
"""
