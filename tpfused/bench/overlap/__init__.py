"""`tpfused bench overlap`: matmuls with a collective, beside what they are made of and what users have today.

`cases.py` says what is measured, `works.py` builds the ways to do it, `worker.py` measures them on every rank, `job.py`
starts the workers and reports, `plot.py` draws.
"""
