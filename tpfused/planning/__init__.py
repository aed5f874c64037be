"""`tpfused plan`: what a model costs at each degree of parallelism, before it is run.

Pure arithmetic, without torch: `shape.py` counts parameters, `block.py` what one rank does in a block, `memory.py` what
it holds, `communication.py` what collectives cost, `rates.py` how fast a machine is, `time.py` what a step takes and
`layouts.py` puts them side by side. `measure.py` and `worker.py` find a machine's rates, and run blocks for `--check`;
`job.py` and `report.py` are the command.
"""
