"""Small classes with the protocols of PyTorch, Hugging Face and tf.data."""

import numpy as np


class RandomSampler:
    pass


class SequentialSampler:
    pass


class Tensor:
    """Converts itself to NumPy as a torch tensor does."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.shape = self.values.shape

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)

    def detach(self):
        return self


class TorchDataset:
    """A map-style dataset, as users of PyTorch write one."""

    __module__ = "torch.utils.data.dataset"

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, number):
        return {
            name: array[number] if name == "y" else Tensor(array[number])
            for name, array in self.arrays.items()
        }


class IterableDataset(TorchDataset):
    """An iterable-style dataset of PyTorch inherits a __getitem__ it cannot answer."""

    def __getitem__(self, number):
        raise NotImplementedError

    def __iter__(self):
        return (TorchDataset.__getitem__(self, number) for number in range(len(self)))


class DataLoader:
    """Yields batches of tensors in an order that differs in every pass if it shuffles."""

    def __init__(self, dataset, batch_size=1, *, shuffle=False, generator=None):
        self.dataset, self.batch_size, self.generator = dataset, batch_size, generator
        self.sampler = RandomSampler() if shuffle else SequentialSampler()
        self.collate_fn = None

    def __len__(self):
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self):
        for start in range(0, len(self.dataset), self.batch_size):
            numbers = range(start, min(start + self.batch_size, len(self.dataset)))
            samples = [self.dataset[number] for number in numbers]
            yield {k: Tensor(np.stack([np.asarray(s[k]) for s in samples])) for k in samples[0]}


class Feature:
    def __init__(self, dtype):
        self.dtype = dtype


class Table:
    """A Hugging Face dataset: columns of Python lists, read several rows at a time."""

    def __init__(self, columns):
        self.columns = columns
        self.column_names = list(columns)
        self.shape = (len(self), len(columns))
        self.features = {
            name: Feature("string" if isinstance(values[0], str) else "float32")
            for name, values in columns.items()
        }

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows):
        return {name: [values[row] for row in rows] for name, values in self.columns.items()}


class StreamedTable:
    """A Hugging Face `IterableDataset`, whose order depends on the epoch."""

    def __init__(self, columns):
        self.columns, self.epoch = columns, 0
        self.column_names, self.features = list(columns), None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batch(self, batch_size):
        raise AssertionError("this makes another dataset, not a batch")

    def __iter__(self):
        count = len(next(iter(self.columns.values())))
        order = np.random.default_rng(self.epoch).permutation(count)
        return ({name: values[row] for name, values in self.columns.items()} for row in order)


class TensorFlowDataset:
    """A tf.data dataset of these elements."""

    element_spec = None

    def __init__(self, elements, cardinality=None):
        self.elements = elements
        self.count = len(elements) if cardinality is None else cardinality

    def as_numpy_iterator(self):
        return iter(self.elements)

    def cardinality(self):
        return np.int64(self.count)

    def batch(self, batch_size):
        raise AssertionError("this makes another dataset, not a batch")
