"""PyTorch's ``DataLoader``: workers that persist call a kernel for each sample, and compile nothing."""

import torch
from torch.utils.data import DataLoader, Dataset

from fastexchange import fast_args


@fast_args(out="x[n], s[] -> y[n]")
def jittered(x, s, y):
    for i in range(len(x)):
        y[i] = x[i] * s[()] + 1.0


class Samples(Dataset):
    def __init__(self, kernel):
        self.kernel = kernel  # comes with its code to workers that are spawned

    def __len__(self):
        return 64

    def __getitem__(self, index):
        sample = self.kernel(torch.arange(16, dtype=torch.float32), torch.tensor(float(index)))
        return sample, sum(self.kernel.stats.cache_misses.values())


def main():
    jittered.precompile((torch.ones(2), torch.tensor(1.0)))
    loader = DataLoader(
        Samples(jittered), batch_size=8, num_workers=2, multiprocessing_context="spawn", persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    for epoch in range(2):
        batches, compiled = zip(*loader, strict=True)
        expected = torch.arange(64.0)[:, None] * torch.arange(16.0) + 1
        assert torch.equal(torch.cat(batches), expected)
        print(f"epoch {epoch}: {len(batches)} batches, {max(map(int, map(torch.max, compiled)))} compiled by a worker")


if __name__ == "__main__":
    main()
