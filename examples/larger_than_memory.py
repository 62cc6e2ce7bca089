"""Data that do not fit into the memory that the program allows itself: Zarr by Dask, and Parquet by pyarrow's batches.

The limit holds from before the data are written: the operating system refuses more (RLIMIT_DATA, Linux). Kernels read each chunk
where Dask, or Arrow, has it, and their results are written back chunk by chunk.
"""

import os
import resource
import tempfile
from pathlib import Path

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others reserve a gigabyte that they do not use

import dask
import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from fastexchange import fast_args

MB = 1 << 20
ALLOWED = 256 * MB
"""Bytes that the program may allocate when it has imported and compiled everything."""
ROWS, COLUMNS, CHUNK = 512, 1 << 17, 4
"""Of the Zarr array, float64: 512 MB in chunks of 4 MB."""
BATCHES, BATCH = 96, 1 << 18
"""Of the Parquet file: 192 MB of column `x` in batches of 2 MB, and as many of `weight`."""


@fast_args
def smoothed(x, share):
    """Exponential smoothing of each row."""
    y = np.empty_like(x)
    for i in range(x.shape[0]):
        level = x[i, 0]
        for j in range(x.shape[1]):
            level += share * (x[i, j] - level)
            y[i, j] = level
    return y


@fast_args
def weighted_changes(x, weight):
    y = np.empty(len(x))
    last = x[0]
    for i in range(len(x)):
        y[i] = weight[i] * (x[i] - last)
        last = x[i]
    return y


@fast_args
def address(x):
    return x.ctypes.data


def allocated():
    """Bytes of private memory that this process may write to: what RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmData:")).split()[1])


def largest():
    """The most bytes of memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compiled_here():
    """How many signatures this process has compiled."""
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in (smoothed, weighted_changes, address))


def through_zarr(folder):
    """Smooth an array of a Zarr store into another store. Returns its bytes."""
    where = []

    def smooth(block):
        where.append(address(block) == block.ctypes.data)
        return smoothed(block, 0.1)

    x = da.random.default_rng(0).normal(size=(ROWS, COLUMNS), chunks=(CHUNK, COLUMNS))
    x.to_zarr(f"{folder}/x.zarr")
    x = da.from_zarr(f"{folder}/x.zarr")
    da.map_blocks(smooth, x, dtype=x.dtype, meta=np.empty((0, 0))).to_zarr(f"{folder}/y.zarr")
    given, made = zarr.open(f"{folder}/x.zarr"), zarr.open(f"{folder}/y.zarr")
    for row in range(0, ROWS, ROWS // 4):
        assert np.array_equal(made[row : row + 1, :999], smoothed.py_func(given[row : row + 1, :999], 0.1))
    assert all(where)
    print(f"Zarr: {x.nbytes // MB} MB in, as many out, {len(where)} chunks, all read where Dask has them")
    return x.nbytes


def through_parquet(folder):
    """Pass two columns of a Parquet file through a kernel, and write a third. Returns their bytes."""
    plain, generator = {"compression": "none", "use_dictionary": False}, np.random.default_rng(0)
    schema = pa.schema([("x", pa.float64()), ("weight", pa.float64())])
    with pq.ParquetWriter(f"{folder}/x.parquet", schema, **plain) as writer:
        for _ in range(BATCHES):
            columns = [pa.array(generator.normal(size=BATCH)) for _ in schema]
            writer.write_batch(pa.record_batch(columns, schema=schema), BATCH)
    total = where = 0
    with pq.ParquetWriter(f"{folder}/y.parquet", pa.schema([("y", pa.float64())]), **plain) as writer:
        for batch in pq.ParquetFile(f"{folder}/x.parquet", pre_buffer=False).iter_batches(BATCH, use_threads=False):
            x, weight = batch.columns
            y = weighted_changes(x, weight)
            where += address(x) == x.buffers()[1].address + 8 * x.offset
            assert np.array_equal(y[:9], weighted_changes.py_func(x[:9].to_numpy(), weight[:9].to_numpy()))
            writer.write_batch(pa.record_batch([pa.array(y)], names=["y"]), BATCH)
            total += batch.nbytes
    assert pq.read_metadata(f"{folder}/y.parquet").num_rows == BATCHES * BATCH
    assert where == BATCHES
    print(f"Parquet: {total // MB} MB in, {total // MB // 2} MB out, {where} batches, all read where Arrow has them")
    return total


def main():
    pa.set_cpu_count(2), pa.set_io_thread_count(1)  # each thread has a stack
    dask.config.set(scheduler="threads", num_workers=2)
    zarr.config.set({"threading.max_workers": 2, "async.concurrency": 2})
    column, chunk = pa.array(np.ones(2)), np.ones((2, 2))
    smoothed.precompile((chunk, 0.1))
    weighted_changes.precompile((column, column))
    address.precompile((chunk,), (column,))
    compiled, before = compiled_here(), largest()
    resource.setrlimit(resource.RLIMIT_DATA, (allocated() + ALLOWED, resource.RLIM_INFINITY))
    try:
        np.empty((ROWS, COLUMNS))
    except MemoryError:
        print(f"{ALLOWED // MB} MB allowed: the array does not fit")
    else:
        raise SystemExit("the array fits into memory")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for passed in (through_zarr(folder), through_parquet(folder)):
            assert passed >= 1.5 * ALLOWED
    print(f"{(largest() - before) // MB} MB more at most than before; {compiled_here() - compiled} compiled by a task")


if __name__ == "__main__":
    main()
