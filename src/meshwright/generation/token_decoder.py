"""Decoders: how the next token's logits are computed, from what earlier tokens left or anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from meshwright.program.trace.precision_policy import follow_policy
from meshwright.program.trace.scopes import module_scopes

LATER, COUNT = "sees later tokens", "depends on how many tokens there are"
"""What a model may do that decoders do not."""
Weights = Sequence[Array]
"""The values of a model's variables, in a decoder's order."""
Cache = Any
"""What a decoder keeps of earlier tokens: a tree of arrays, dim 0 of each being the row."""
Source = tuple[Any, ...]
"""What the model reads besides tokens, such as the text that it translates: one array, or none."""


Kept = TypeVar("Kept")
KEPT = 8
"""Models and lengths of which something is kept."""


UNLIMITED = 2**31 - 1
"""The context of models that name none."""


class ModelStructure:
    """What models of one program share; the same object for models alike.

    Attributes:
        tree: how its weights are arranged.
        context: the most tokens of a row that it takes, as it or its parts say.
    """

    def __init__(self, model: nnx.Module, graphdef: Any, tree: Any) -> None:
        self.name, self.graphdef, self.tree = type(model).__name__, graphdef, tree
        parts = [part for _, part in nnx.iter_modules(model)]
        found = [getattr(part, "context_length", None) for part in parts]
        self.context = min((each for each in found if isinstance(each, int)), default=UNLIMITED)


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model as a function of its weights.

    Attributes:
        structure: all but the weights.
        weights: the values of its variables.
        compute_dtype: what modules exchange instead of float32, as in training, where weights are
            cast to it; None for what the model says. The logits are float32 then.
        source: the shapes of what one row has besides its tokens.
    """

    structure: ModelStructure
    weights: list[Any]
    compute_dtype: Any = None
    source: Source = ()

    @property
    def shapes(self) -> SplitModel:
        """The model without values: programs are kept for other calls, weights are not."""
        return replace(self, weights=[jax.ShapeDtypeStruct(w.shape, w.dtype) for w in self.weights])

    def logits_of(self, weights: Weights, tokens: Array) -> Array:
        """Return the logits [B, T, V] of tokens [B, T]; the source comes after the weights."""
        own = len(weights) - len(self.source)
        # A copy per call, because a call may change the model, such as counters of random streams.
        state = jax.tree.unflatten(self.structure.tree, list(weights[:own]))
        copied = nnx.merge(self.structure.graphdef, state, copy=True)
        copied.eval()
        follow_policy(copied, self.compute_dtype)
        with module_scopes(copied, self.compute_dtype):
            return copied(*weights[own:], tokens)


class TokenDecoder(Protocol):
    """Computes the logits of the next token; `start` and `step` can be traced.

    Attributes:
        length: the most tokens of a row, prompt and continuation together.
        reason: why nothing is kept of earlier tokens; empty if their keys, values and states are.
        sees: what the logits of a row depend on besides its earlier tokens; if anything, rows have
            no padding, and all of a call have the same length.
    """

    length: int
    reason: str
    sees: str

    @property
    def extra_bytes(self) -> tuple[int, int]:
        """The bytes of what `prepare` makes of weights, and of the cache of a row."""
        ...

    def prepare(self, weights: Weights) -> Weights:
        """Return what the other methods take as weights, from the values of the variables."""
        ...

    def start(
        self, weights: Weights, tokens: Array, lengths: Array, source: Source = ()
    ) -> tuple[Array, Cache]:
        """Read the prompts.

        Args:
            weights: from `prepare`.
            tokens: int32 [B, P], each row padded at its end.
            lengths: int32 [B], the tokens of each row without padding, at least one.
            source: what each row has besides its tokens, [B, …].

        Returns:
            The logits [B, V] of the token after each prompt, and the cache.
        """
        ...

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row.

        Args:
            weights: from `prepare`.
            cache: from the last call.
            tokens: int32 [B].
            positions: int32 [B], where they stand in their rows.

        Returns:
            The logits [B, V] of the token after them, and the cache.
        """
        ...


@dataclass
class RecomputingDecoder:
    """Runs the model on all earlier tokens again for every new one.

    If more than earlier tokens counts, rows are not padded, and each length has its own program.
    The model has no values.
    """

    model: SplitModel
    length: int
    reason: str
    sees: str = ""
    extra_bytes: tuple[int, int] = 0, 0

    def prepare(self, weights: Weights) -> Weights:
        """Return the weights; see `TokenDecoder`."""
        return weights

    def start(
        self, weights: Weights, tokens: Array, lengths: Array, source: Source = ()
    ) -> tuple[Array, Cache]:
        """Read the prompts; see `TokenDecoder`."""
        room = 0 if self.sees else self.length - tokens.shape[1]
        window = jnp.pad(tokens, ((0, 0), (0, room)))
        return self._logits(weights, window, lengths - 1, source), (window, source)

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row; see `TokenDecoder`."""
        window, source = cache
        window = (
            jnp.concatenate([window, tokens[:, None]], axis=1)
            if self.sees
            else window.at[jnp.arange(tokens.shape[0]), positions].set(tokens)
        )
        return self._logits(weights, window, positions, source), (window, source)

    def try_out(self, weights: Weights, vocabulary: int) -> str:
        """Return what else than earlier tokens changes a row's logits: then padding is wrong.

        Nothing can be tried out without values.
        """
        if any(isinstance(weight, jax.ShapeDtypeStruct) for weight in weights):
            return ""
        random = np.random.default_rng(0)
        row = random.integers(0, vocabulary, (1, self.length), np.int32)
        logits_of = jax.jit(self.model.logits_of)
        weights = [*weights, *(jnp.ones(s.shape, s.dtype) for s in self.model.source)]
        logits = logits_of(weights, row)
        scale, eps = jnp.abs(logits).max(), float(jnp.finfo(logits.dtype).eps)
        half = self.length // 2
        # Some in a row, because a chunk may see no further than its end.
        cuts = {*range(half, half + 8), *random.integers(1, self.length, 16).tolist()}
        for count in sorted(cut for cut in cuts if 0 < cut < self.length):
            other = random.integers(0, vocabulary, row.shape, np.int32)
            other[:, :count] = row[:, :count]
            change = jnp.abs(logits_of(weights, other) - logits)[:, :count]
            if bool((change > 16 * eps * scale).any()):
                return LATER
        try:
            alone = logits_of(weights, row[:, : half + 1])
        except Exception:
            # Some models take only some lengths; then the rows of this one have to do.
            return ""
        # Sums of another length are rounded otherwise.
        near = min(0.03, 1000 * eps) * scale
        return COUNT if bool((jnp.abs(logits[:, : half + 1] - alone) > near).any()) else ""

    def _logits(self, weights: Weights, window: Array, positions: Array, source: Source) -> Array:
        # Row by row as far as the model can tell: some mix the rows of a batch.
        def one(row: Array, source: Source) -> Array:
            return self.model.logits_of(with_source(weights, source), row[None])[0]

        logits = jax.vmap(one)(window, source)
        return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]


class _Seen(NamedTuple):
    """A model that was taken apart: its attributes then, and its variables in their order."""

    structure: ModelStructure
    attributes: list[tuple[dict[str, Any], list[Any]]]
    variables: list[nnx.Variable[Any]]

    @property
    def unchanged(self) -> bool:
        """Whether the model has the same parts still; Flax would take long to tell."""
        return all(
            len(now) == len(then) and all(map(is_, now.values(), then))
            for now, then in self.attributes
        )


_seen: WeakKeyDictionary[nnx.Module, _Seen] = WeakKeyDictionary()
_structures: OrderedDict[Any, ModelStructure] = OrderedDict()


def with_source(weights: Weights, source: Source) -> list[Array]:
    """Return what `SplitModel.logits_of` takes for one row."""
    return [*weights, *(each[None] for each in source)]


def split_model(model: nnx.Module, compute_dtype: Any = None, source: Source = ()) -> SplitModel:
    """Take a model apart.

    ``source`` is what rows have besides tokens, as arrays [B, …] or their shapes.
    """
    structure, weights = _parts(model)
    rows = tuple(jax.ShapeDtypeStruct((1, *s.shape[1:]), s.dtype) for s in source)
    return SplitModel(structure, weights, compute_dtype, rows)


def _parts(model: nnx.Module) -> tuple[ModelStructure, list[Any]]:
    seen = _seen.get(model)
    if seen is not None and seen.unchanged:
        return seen.structure, [variable.get_raw_value() for variable in seen.variables]
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    structure = ModelStructure(model, graphdef, tree)
    try:
        structure = _structures.pop(graphdef, structure)
        _structures[graphdef] = structure
    except TypeError:
        # A model with attributes that have no hash.
        return structure, leaves
    while len(_structures) > KEPT:
        _structures.popitem(last=False)
    attributes: list[tuple[dict[str, Any], list[Any]]] = []
    found: dict[int, Any] = {}
    if _walk(model, attributes, found) and all(id(leaf) in found for leaf in leaves):
        _seen[model] = _Seen(structure, attributes, [found[id(leaf)] for leaf in leaves])
    return structure, leaves


def _walk(part: Any, attributes: list[Any], found: dict[int, Any]) -> bool:
    """Note the attributes of modules and the variables; return whether nothing else can change."""
    attributes.append((vars(part), [*vars(part).values()]))
    for name, value in vars(part).items():
        if isinstance(value, nnx.Variable):
            # Several variables with one array may have different ones later.
            if found.setdefault(id(value.get_raw_value()), value) is not value:
                return False
        elif name.startswith("_pytree__"):
            continue
        elif isinstance(value, nnx.Pytree):
            if not _walk(value, attributes, found):
                return False
        elif isinstance(value, list | dict | set | np.ndarray | jax.Array):
            return False
    return True


class PerModel(Generic[Kept]):
    """Keeps what a function of a model, and further arguments, made for the last models alike.

    What it returns depends on no weight.
    """

    def __init__(self, make: Callable[..., Kept]) -> None:
        self.kept: OrderedDict[Any, Kept] = OrderedDict()
        self._make = make

    def __call__(self, model: SplitModel, *more: Any) -> Kept:
        """Return what was made for a model of the same program, or make it."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in model.weights)
        wide = jax.config.values["jax_enable_x64"]
        key = (model.structure, shapes, model.compute_dtype, model.source, more, wide)
        found = self.kept.pop(key, None)
        self.kept[key] = found = self._make(model, *more) if found is None else found
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return found
