"""What `tpfused check` does: every overlapped operation and every layer against the dense computation in float64."""
