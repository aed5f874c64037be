"""`tpfused bench overlap`: matmuls with a collective, beside what they are made of and what users have today.

`cases.py` says what is measured, `worker.py` measures it on every rank, `job.py` starts the workers and reports.
"""
