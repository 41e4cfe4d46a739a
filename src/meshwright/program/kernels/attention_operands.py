"""The operands of attention: which dims of them are samples, heads, positions and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.program.dims.op import free_dims, result_dims
from meshwright.program.jaxpr.equations import Equation, Var
from meshwright.program.kernels.masks import Allowed
from meshwright.program.kernels.regions import NotReplaced
from meshwright.program.kernels.score_functions import ScoreFunction

Role = tuple[str, int]
"""What a dim of the scores is: ("batch", n), ("query", dim of the query) or ("key", dim)."""

_CHANNELS: Role = ("channels", 0)


@dataclass(frozen=True)
class AttentionOperands:
    """The operands of attention, and how their dims are ordered.

    ``query`` has dims (batch…, heads, group…, length, channels) in the order given by
    ``query_dims``, ``key`` and ``value`` have (batch…, heads, length, channels), and the output of
    the second product has the same dims as the query in the order given by ``output_dims``.

    Attributes:
        query: queries.
        key: keys.
        value: values.
        query_dims: the permutation of the query's dims to (batch…, length, group…, channels).
        key_dims: the permutation of the key's dims to (batch…, length, channels).
        value_dims: the same for the value.
        output_dims: the permutation of (batch…, length, group…, channels) to the output's dims.
        num_batch: how many batch dims there are, heads included.
        scale: the factor on the scores.
        allowed: what queries may attend to.
        function: what is computed from scores, if it is more than a scale and a mask.
        leaves: the arrays it reads, else the mask if that depends on documents; with the position
            of each of their dims in (batch…, length, group…, keys), None if it has size 1.
        formula: what is computed from scores, also if that is only a scale and a mask.
        formula_leaves: the arrays that the formula reads.
    """

    query: Var
    key: Var
    value: Var
    query_dims: tuple[int, ...]
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    output_dims: tuple[int, ...]
    num_batch: int
    scale: float
    allowed: Allowed
    function: ScoreFunction | None = None
    leaves: tuple[tuple[Var, tuple[int | None, ...]], ...] = ()
    formula: ScoreFunction | None = None
    formula_leaves: tuple[tuple[Var, tuple[int | None, ...]], ...] = ()

    @property
    def by_formula(self) -> AttentionOperands:
        """The same, its masks computed of the documents of queries and keys."""
        return replace(self, function=self.formula, leaves=self.formula_leaves)

    @property
    def for_chunks(self) -> bool:
        """Whether chunks of queries and keys need only their own parts of what scores depend on."""
        if self.function is None and not self.leaves:
            return True
        ends = {self.num_batch, len(self.output_dims) - 1}
        known = self.formula is not None and self.formula.normalized
        return known and not any(ends <= {*dims} for _, dims in self.formula_leaves)

    @property
    def inputs(self) -> tuple[Var, ...]:
        """The variables that it reads."""
        return (self.query, self.key, self.value, *(leaf for leaf, _ in self.leaves))

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """Which dims count positions, of each input and of the result."""
        count, last = self.num_batch, len(self.output_dims) - 1
        leaves = (
            tuple(d for d, at in enumerate(dims) if at in (count, last)) for _, dims in self.leaves
        )
        keys = (self.key_dims[-2],), (self.value_dims[-2],)
        return ((self.query_dims[count],), *keys, *leaves, (self.output_dims.index(count),))

    def __str__(self) -> str:
        return str(self.allowed) + ("" if self.function is None else f", {self.function.why}")


@dataclass(frozen=True)
class ScoreProduct:
    """The product of queries and keys.

    Attributes:
        eqn: the product.
        key_side: which operand is the key.
    """

    eqn: Equation
    key_side: int

    @property
    def query(self) -> Var:
        """The operand with the queries."""
        return _variable(self.eqn, 1 - self.key_side)

    @property
    def key(self) -> Var:
        """The operand with the keys."""
        return _variable(self.eqn, self.key_side)

    @property
    def query_free(self) -> list[int]:
        """The dims of the query that are neither batch dims nor channels: positions and groups."""
        return free_dims(self.eqn, 1 - self.key_side)

    @property
    def key_positions(self) -> int:
        """The dim of the key that counts positions."""
        free, (contracting, _) = free_dims(self.eqn, self.key_side), _numbers(self.eqn)
        if len(free) != 1 or len(contracting[0]) != 1 or not self.query_free:
            raise NotReplaced("its keys have several dims of positions or channels")
        return free[0]

    @property
    def order(self) -> list[int]:
        """The batch dims as the query has them, so that heads come last."""
        batch = _numbers(self.eqn)[1][1 - self.key_side]
        return sorted(range(len(batch)), key=lambda n: batch[n])

    def roles(self, length: int) -> list[Role]:
        """Return the dims of the scores but the keys, in the order of the kernel."""
        groups = [d for d in self.query_free if d != length]
        return [*(("batch", n) for n in self.order), *(("query", d) for d in (length, *groups))]

    def query_dims(self, length: int) -> tuple[int, ...]:
        """Return the query's dims in the order of the kernel."""
        side = 1 - self.key_side
        contracting, batch = _numbers(self.eqn)
        groups = [d for d in self.query_free if d != length]
        return (*(batch[side][n] for n in self.order), length, *groups, contracting[side][0])

    def key_dims(self) -> tuple[int, ...]:
        """Return the key's dims in the order of the kernel."""
        side = self.key_side
        contracting, batch = _numbers(self.eqn)
        return (*(batch[side][n] for n in self.order), self.key_positions, contracting[side][0])


@dataclass(frozen=True)
class ValueProduct:
    """The product of weights and values.

    Attributes:
        eqn: the product.
        weights: the operand with the weights.
        roles: what the dims of the weights are.
    """

    eqn: Equation
    weights: Var
    roles: Sequence[Role]

    @property
    def _side(self) -> int:
        return 0 if self.eqn.invars[0] is self.weights else 1

    @property
    def value(self) -> Var:
        """The operand with the values."""
        return _variable(self.eqn, 1 - self._side)

    @property
    def _batch(self) -> list[Role]:
        return [self.roles[d] for d in _numbers(self.eqn)[1][self._side]]

    @property
    def summed(self) -> list[Role]:
        """The dims of the weights that it sums over."""
        return [self.roles[d] for d in _numbers(self.eqn)[0][self._side]]

    def check(self, scores: ScoreProduct) -> None:
        """Raise unless it sums over the keys, for each sample and head."""
        batch: list[Role] = [("batch", n) for n in range(len(scores.order))]
        if sorted(self._batch) != batch or self.summed != [("key", scores.key_positions)]:
            raise NotReplaced("its second product sums over something other than the keys")
        if len(free_dims(self.eqn, 1 - self._side)) != 1:
            raise NotReplaced("its values have several dims of channels")

    def value_dims(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return the value's dims in the order of the kernel."""
        side = 1 - self._side
        contracting, batch = _numbers(self.eqn)
        batch_dims = [batch[side][self._batch.index(("batch", n))] for n in order]
        return (*batch_dims, contracting[side][0], *free_dims(self.eqn, side))

    def output_dims(self, kernel: Sequence[Role]) -> tuple[int, ...]:
        """Return the result's dims as positions among those of the kernel."""
        dims = [pair[self._side] for pair in result_dims(self.eqn)]
        positions = {role: n for n, role in enumerate([*kernel, _CHANNELS])}
        return tuple(positions[_CHANNELS if d is None else self.roles[d]] for d in dims)


def _numbers(eqn: Equation) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Return the contracted dims and the batch dims of a product, for each operand."""
    return eqn.params["dimension_numbers"]


def _variable(eqn: Equation, side: int) -> Var:
    atom = eqn.invars[side]
    if not isinstance(atom, Var):
        raise NotReplaced("one of its operands is a constant")
    return atom
