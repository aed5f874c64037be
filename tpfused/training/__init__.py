"""The job behind `tpfused train`: presets, data, worker processes, the loop, checkpoints and the report."""
