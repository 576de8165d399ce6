"""Rows put into other GPUs' memory by kernels: needs Triton, and nvshmem4py where it runs (`moe-engine[nvshmem]`).

calls.py      the two device functions of NVSHMEM that the kernels call
exchange.py   an exchange of rows: a kernel that puts, one that takes what came
runtime.py    start-up, memory that all ranks have at the same place, kernels made known to the library
"""
