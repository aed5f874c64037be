"""Matmuls that overlap a collective of their tensor-parallel group.

`communicator` holds what the group needs for it on a GPU, `tiers` says how rows travel, and each operation has a file.
`choice` decides how one runs: `measure` times the ways, `saved` keeps the times, `explain` shows what came of it.
"""
