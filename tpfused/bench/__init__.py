"""Benchmarks that users run on their own machine: `tpfused bench`.

`case.py` says what a case is, `operations/` holds the cases of each kernel, `measure.py` times them, `runner.py` checks
and measures one case, `job.py` goes through them all, `results.py`, `console.py` and `plot.py` show and keep the rows.
"""

# Each is a module of `operations`, named as its kernel, with SUMMARY and CASES.
OPERATIONS = ("linear_act", "gated_act", "softmax", "embedding", "cross_entropy")
