"""Benchmarks that users run on their own machine: `tpfused bench`.

`case.py` says what a case is, `operations/` holds the cases of each kernel, `measure.py` times them, `runner.py` checks
and measures one case, `job.py` goes through them all. `overlap/` and `model/` have cases and jobs of their own, whose
ranks `sampling.py` times together. `options.py`, `results.py`, `console.py` and `plot.py` are of all: the command line,
and the rows as shown and kept.
"""

# Each is a module of `operations`, named as its kernel, with SUMMARY and CASES.
OPERATIONS = ("linear_act", "gated_act", "softmax", "rotary", "decode", "embedding", "cross_entropy")
