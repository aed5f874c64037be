"""`tpfused bench model`: whole LLaMA models, trained and decoded, beside what users have today.

`cases.py` says what is measured, and how much work it is. `programs.py` builds our model, `plain.py` and `megatron.py`
its peers with the same weights. `accuracy.py` holds them to float32, `worker.py` measures them on every rank,
`decode.py` makes decoding steps, `job.py` starts the workers and reports, `plot.py` draws.
"""
