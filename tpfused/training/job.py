"""`tpfused train`: the tensor-parallel run, then its dense twin, then the report."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpfused.cli.errors import UserError
from tpfused.training.data import make_data
from tpfused.training.loop import train
from tpfused.training.options import resolve
from tpfused.training.presets import RunConfig
from tpfused.training.report import Report, check_outputs
from tpfused.training.saving import check_target, find
from tpfused.workers import Worker, WorkerFailed, describe, run_workers, torchrun_worker

INTERRUPTED = 130


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for, in workers of its own or as one of torchrun's; returns the exit code."""
    worker = torchrun_worker(emit=lambda name, payload: None)
    try:
        run = _prepare(options, worker)
        if worker is not None and worker.rank != 0:
            _train_here(run, worker)
        else:
            _train_and_report(run, worker, options)
        return 0
    except UserError:
        if worker is None or worker.local_rank == 0:  # one line a host, not one a worker
            raise
        return 2
    except WorkerFailed as failure:
        if options["traceback"]:
            print(failure.details, file=sys.stderr)
        print(f"tpfused train: {failure}", file=sys.stderr)
        code = failure.code
    except KeyboardInterrupt:
        if worker is None or worker.rank == 0:
            print("tpfused train: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if worker is not None:
        sys.stdout.flush()
        # Not `return`: destructors of a broken process group can wait for its lost peers.
        os._exit(code)
    return code


def _prepare(options: Mapping[str, Any], worker: Worker | None) -> RunConfig:
    """The run, once everything that can be found wrong before it starts has been looked for."""
    reports = worker is None or worker.rank == 0
    if reports:
        check_outputs(options)
    checkpoint = find(options["resume"]) if options["resume"] else None
    run = resolve(options, worker, checkpoint)
    make_data(run)
    if run.save and reports:
        check_target(run)
    return run


def _train_and_report(run: RunConfig, worker: Worker | None, options: Mapping[str, Any]) -> None:
    report = Report(run)
    with report.phase("tensor parallel") as (on_event, parallel):
        if worker is None:
            run_workers(train, run, run.world, on_event)
        else:
            _train_here(run, replace(worker, emit=on_event))
    dense = None
    if not options["no_dense"]:
        with report.phase("dense twin") as (on_event, dense):
            run_workers(train, run.dense_twin(), 1, on_event)
    report.finish(parallel, dense, options)


def _train_here(run: RunConfig, worker: Worker) -> None:
    """Train in this process, as one of torchrun's workers."""
    try:
        train(run, worker)
    except Exception as error:
        raise WorkerFailed(*describe(error, worker)) from error
