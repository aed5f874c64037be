"""The `--plot` picture."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from tpfused.cli.outputs import writing
from tpfused.training.summary import relative_differences

# Where both runs agree to the last bit, a logarithmic axis still wants a number.
SMALLEST = 1e-17


def plot(summary: Mapping[str, Any], title: str, path: str) -> None:
    """Both runs' losses, and below them how far apart they are."""
    losses, dense = summary["parallel"]["loss"], summary["dense"]
    steps = range(summary["first_step"] + 1, summary["first_step"] + 1 + len(losses))
    figure = Figure(figsize=(8, 6), layout="constrained")
    rows = 2 if dense else 1
    top, *below = figure.subplots(rows, 1, sharex=True, height_ratios=(2, 1)[:rows], squeeze=False)[:, 0]
    if dense:
        top.plot(steps, dense["loss"], color="tab:gray", linewidth=4, alpha=0.5, label="dense twin")
        differences = relative_differences(losses, dense["loss"])
        below[0].semilogy(steps, [max(SMALLEST, each) for each in differences], color="tab:red", linewidth=1)
        below[0].set_ylabel("relative difference")
    top.plot(steps, losses, color="tab:blue", linewidth=1, label="tensor parallel")
    top.set_ylabel("loss")
    top.set_title(title)
    top.legend()
    figure.axes[-1].set_xlabel("step")
    with writing("plot", path):
        figure.savefig(path, dpi=120)
