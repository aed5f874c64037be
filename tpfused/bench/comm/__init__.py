"""`tpfused bench comm`: collectives alone, and what is needed to predict them.

`cases.py` says what is measured and on which groups, `works.py` builds each collective, `worker.py` measures on every
rank, `rates.py` the rest of the machine, with the layers of `programs.py`. `job.py` starts the workers, fits and
reports, `plot.py` draws.
"""
