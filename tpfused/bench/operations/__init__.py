"""The cases of each kernel, one operation a module. A new module's name goes into `tpfused.bench.OPERATIONS`."""

from importlib import import_module

from tpfused.bench.case import Case


def summary(operation: str) -> str:
    return _module(operation).SUMMARY


def cases(operation: str) -> list[Case]:
    return _module(operation).CASES


def _module(operation: str):
    return import_module(f"tpfused.bench.operations.{operation}")
