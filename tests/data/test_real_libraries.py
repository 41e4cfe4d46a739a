"""PyTorch and Hugging Face datasets themselves, as their stand-ins elsewhere promise."""

import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.data.elements import Expected
from meshwright.data.user_data import as_data

pytestmark = pytest.mark.full

COUNT, SIZE = 22, 8
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32")
Y = np.arange(COUNT) % 5
ARRAYS = {"x": X, "y": Y}


def torch_dataset():
    from torch import tensor
    from torch.utils.data import Dataset

    class Own(Dataset):
        def __len__(self):
            return COUNT

        def __getitem__(self, number):
            return {"x": tensor(X[number]), "y": int(Y[number])}

    return Own()


def torch_stream():
    from torch.utils.data import IterableDataset

    class Own(IterableDataset):
        def __iter__(self):
            return ({"x": X[number], "y": Y[number]} for number in range(COUNT))

    return Own()


def torch_loader():
    from torch.utils.data import DataLoader

    return DataLoader(torch_dataset(), batch_size=SIZE)


def table(kind=None):
    from datasets import Dataset

    made = Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    return made if kind is None else made.with_format(kind)


FORMS = {
    "Dataset": (torch_dataset, SIZE),
    "IterableDataset": (torch_stream, SIZE),
    "DataLoader": (torch_loader, None),
    "table": (table, SIZE),
    "NumPy table": (lambda: table("numpy"), SIZE),
    "torch table": (lambda: table("torch"), SIZE),
    "streamed table": (lambda: table().to_iterable_dataset(), SIZE),
}


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:the last batch of the data has 6 samples")
def test_a_real_dataset_trains_as_its_arrays_do(form):
    make, size = FORMS[form]

    def weights(data, size):
        trainer = mw.Trainer(
            model=lambda rngs: nnx.Linear(3, 5, rngs=rngs), loss=loss, optimizer=optax.sgd(0.1)
        )
        result = trainer.fit(data, steps=5, batch_size=size)
        held_out = ARRAYS if "tream" in form or form == "IterableDataset" else data
        assert trainer.evaluate(held_out)["eval_samples"] == COUNT
        return result.params["kernel"]

    expected = Expected(batch_size=size)
    same = as_data(make(), expected=expected)
    batches = [
        {name: np.asarray(values) for name, values in same.batch(step, SIZE).items()}
        for step in range(5)
    ]
    for batch in batches:
        for x, y in zip(batch["x"], batch["y"], strict=True):
            row = int(np.flatnonzero((x == X).all(1))[0])
            assert y == Y[row]
    plain = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    for batch in batches:
        optimizer.update(plain, nnx.grad(loss)(plain, batch))
    np.testing.assert_allclose(weights(make(), size), plain.kernel[...], rtol=1e-4, atol=1e-6)


def test_real_loaders_and_tables_are_refused_or_warned_about(tmp_path):
    import torch
    from datasets import DatasetDict
    from torch.utils.data import DataLoader, TensorDataset

    with pytest.raises(mw.UserError, match="the column `text` of the dataset holds text"):
        as_data(table().add_column("text", ["a"] * COUNT))
    with pytest.raises(mw.UserError, match="a DatasetDict of several splits") as caught:
        as_data(DatasetDict({"test": table(), "train": table()}))
    assert caught.value.fix == 'choose one: data["train"]'
    tensors = TensorDataset(torch.tensor(X).bfloat16(), torch.tensor(Y))
    loader = DataLoader(tensors, batch_size=SIZE, shuffle=True)
    data = as_data(loader)
    assert "resumes sample for sample" in data.order
    x, y = data.batch(0, SIZE)
    assert x.shape == (SIZE, 3)
    assert y.shape == (SIZE,)
