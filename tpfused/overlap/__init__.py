"""Matmuls that overlap a collective of their tensor-parallel group, one operation a file.

A call is checked and planned once for its kind (`plans`), and comes to the operation's functions directly or,
compiled, through an operator of torch's (`operators`); those call the extension (`calls`) or torch (`plain`).
`communicator` holds what the group needs for it on a GPU, `tiers` says how rows travel, and `choice` decides how a call
runs: `measure` times the ways, `saved` keeps the times, `explain` shows what came of it.
"""
