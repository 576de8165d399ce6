# shellcheck shell=bash
# Environment of a rank: sourced by the other files here. A variable that is already set keeps its value.
# Every line says why. The values for GPUs are the libraries' documented ones; they have not been tuned on a cluster.

default() { # name value
    [[ -n "${!1:-}" ]] || export "$1=$2"
}

# Any machine
default OMP_NUM_THREADS 1     # ranks share a node's cores: more threads a rank than cores slow all of them down
default PYTHONUNBUFFERED 1    # a log shows what was printed even where the rank was killed

# Failures (torch): a lost rank must end the job, and say where the others waited
default TORCH_NCCL_ASYNC_ERROR_HANDLING 1 # a collective past its time limit ends the process: no rank waits for ever
default TORCH_FR_BUFFER_SIZE 2000         # torch keeps each rank's last collectives (operation, sizes, stack) …
default TORCH_NCCL_DUMP_ON_TIMEOUT 1      # … and writes them at a time-out; `torchfrtrace` finds the rank that differs

# Memory (torch)
default PYTORCH_ALLOC_CONF expandable_segments:True # rows per expert change every step: fixed segments fragment

# Network: names differ from cluster to cluster; `ip link` and `ibv_devinfo` list them. Set in the job, if at all:
#   NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0   the device over which ranks meet, if the first is not reachable
#   NCCL_IB_HCA=mlx5                                  the InfiniBand adapters to use, if storage has some of its own
default NCCL_DEBUG WARN # NCCL's own reason of a failure; INFO also prints the network it chose

# NVSHMEM (dispatch and combine from inside a kernel)
default NVSHMEM_SYMMETRIC_SIZE 2G       # room for the buffers that other GPUs write to; too small fails at start
default NVSHMEM_IB_ENABLE_IBGDA 1       # the GPU rings the adapter's doorbell: no proxy thread on the CPU for each message
