"""What is computed of each value to get the next token's logits: new rows, all rows, or nothing.

The plan is made backwards from the logits of one row. Where an operation needs a value of all rows,
the value is kept in the cache, and only its new rows are computed. Values that no cache depends on
are needed for the last row of a prompt only.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from meshwright.generation.positions import NotIncremental, Positions
from meshwright.generation.token_decoder import LATER
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.op import nbytes_of
from meshwright.program.dims.row_rules import RowRule
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of

WHOLE = (-1, False)
"""All rows of a value, or a value that has none."""
Need = tuple[int, bool]
"""A dim of which rows are needed, and whether all new rows are, or only the last one."""

_MOVES = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type"})
"""Operations that are cheaper to repeat than their results are to keep."""
_FREE = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "transpose"})
"""Operations that become part of the one that reads their result; it would only take memory."""
_OF_PAIRS = ELEMENTWISE | {
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "dot_general",
    "reduce_sum", "reduce_max", "argmax",
}  # fmt: skip
"""Operations that may read values with two dims of positions."""
_VANISHING = {"reduce_sum": "zero", "reduce_max": "low", "argmax": "low"}
"""What later positions must be for an operation over them not to see them."""


@dataclass
class RowPlan:
    """What is computed of each value of a program.

    Attributes:
        positions: what is known of the program.
        needs: by variable, what is needed of it.
        kept: by variable in the cache, its dim of positions.
        carried: the loops over positions, whose states are in the cache.
        of_source: values that follow from the source alone, which are computed once.
        fixed: those of them that are in the cache.
        prepared: weights and values made of weights alone, which are the same for all tokens and
            lengths.
        windows: by value and dim that is summed over, how far back it is not masked; 0 if all is.
    """

    positions: Positions
    needs: dict[Var, set[Need]] = field(default_factory=dict[Var, set[Need]])
    kept: dict[Var, int] = field(default_factory=dict[Var, int])
    carried: list[Equation] = field(default_factory=list[Equation])
    of_source: set[Var] = field(default_factory=set[Var])
    fixed: list[Var] = field(default_factory=list[Var])
    prepared: list[Var] = field(default_factory=list[Var])
    windows: dict[tuple[Var, int], int] = field(default_factory=dict[tuple[Var, int], int])

    def need(self, atom: Atom, *needs: Need) -> None:
        """Note that something is needed of a value."""
        if not isinstance(atom, Literal):
            self.needs.setdefault(atom, set()).update(needs)

    def look_back(self, eqn: Equation, atom: Atom, row: int, key: int, state: str) -> None:
        """Raise unless later positions vanish where they are summed over; note the window."""
        masked = self.positions.masked
        if masked(atom, row, key) != state:
            raise NotIncremental.by(eqn, LATER)
        assert not isinstance(atom, Literal)
        windows = sorted(self.positions.windows)
        seen = (window for window in windows if masked(atom, row, key, window) == state)
        self.windows[atom, key] = next(seen, 0)


def plan_rows(
    positions: Positions, of_weights: Collection[Var] = (), num_sources: int = 0
) -> RowPlan:
    """Plan how the logits of the next token are computed; raises `NotIncremental`.

    ``of_weights`` are the values that are the same for all tokens and lengths; ``num_sources`` is
    how many inputs before the tokens are the source of a row.
    """
    plan = RowPlan(positions)
    (logits,) = positions.jaxpr.outvars[:1]
    if isinstance(logits, Literal) or positions.of(logits) != (1,):
        raise NotIncremental("the model does not return logits [rows, tokens, vocabulary]")
    if aval_of(logits).shape[1] != positions.length:
        raise NotIncremental("the model does not return logits for each token")
    plan.need(logits, (1, False))
    for eqn in reversed(positions.jaxpr.eqns):
        name = eqn.primitive.name
        for number, variable in enumerate(eqn.outvars):
            if variable in of_weights and variable in plan.needs and name not in _FREE:
                plan.prepared.append(variable)
                continue
            for need in _resolved(plan, eqn, number, variable):
                _pass_on(plan, eqn, number, need)
    first, tokens = len(positions.jaxpr.invars) - 1 - num_sources, positions.jaxpr.invars[-1]
    plan.prepared += [v for v in positions.jaxpr.invars[:first] if v in plan.needs]
    # A chunk is computed again for each of its tokens.
    if WHOLE in plan.needs.get(tokens, ()) or positions.chunk > 1:
        plan.kept[tokens] = 1
    _fix_source(plan, positions.jaxpr.invars[first:-1])
    return plan


def _fix_source(plan: RowPlan, sources: Sequence[Var]) -> None:
    """Find what follows from the source alone, and what of it new rows are computed from."""
    plan.of_source.update(sources)
    read: set[Atom] = set()
    for eqn in plan.positions.jaxpr.eqns:
        own = {a for a in eqn.invars if not isinstance(a, Literal)}
        new = plan.positions.depends(eqn.outvars[0])
        if own & plan.of_source and not new:
            plan.of_source.update(eqn.outvars)
        if new or any(plan.needs.get(v, set()) - {WHOLE} for v in eqn.outvars):
            read |= own
    plan.fixed = [v for v in plan.needs if v in plan.of_source & read and WHOLE in plan.needs[v]]


def _resolved(plan: RowPlan, eqn: Equation, number: int, variable: Var) -> list[Need]:
    """Return what is to be computed of a value; one needed whole may come from the cache."""
    needs = plan.needs.get(variable, set())
    positions = plan.positions
    if WHOLE not in needs or not positions.depends(variable):
        return sorted(needs)
    dims = positions.of(variable)
    if len(dims) != 1:
        raise NotIncremental.by(eqn, "needs all pairs of positions" if dims else "")
    rule = positions.rule(eqn, number, dims[0])
    moves = _smallest_source(positions, variable) < nbytes_of(aval_of(variable))
    if rule is None or (rule.whole and positions.lookahead(variable, dims[0]) > 0):
        raise NotIncremental.by(eqn)
    if moves or rule.whole:
        return sorted(needs)
    plan.kept[variable] = dims[0]
    needs.add((dims[0], True))
    return sorted(needs - {WHOLE})


def _smallest_source(positions: Positions, variable: Var) -> int:
    """Return the bytes of the smallest value that this one is only moved or repeated from."""
    size, atom = nbytes_of(aval_of(variable)), variable
    while atom in positions.made:
        eqn, _ = positions.made[atom]
        source = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name not in _MOVES or not isinstance(source, Var):
            break
        if len(positions.of(source)) != 1:
            break
        atom = source
        size = min(size, nbytes_of(aval_of(atom)))
    return size


def stored_order(plan: RowPlan, variable: Var, dim: int) -> tuple[int, ...]:
    """Return the order of a kept value's dims in the cache.

    A product is fastest if the dims that it is repeated over come first, then positions.
    """
    first: Sequence[int] = ()
    same = {variable}
    for eqn in plan.positions.jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and same.intersection(eqn.invars):
            same.update(eqn.outvars)
        if eqn.primitive.name == "dot_general" and (read := same.intersection(eqn.invars)):
            first = eqn.params["dimension_numbers"][1][list(eqn.invars).index(read.pop())]
    if dim in first:
        first = ()
    rest = [d for d in range(len(aval_of(variable).shape)) if d not in (*first, dim)]
    return (*first, dim, *rest) if first else tuple(sorted((*rest, dim)))


def _pass_on(plan: RowPlan, eqn: Equation, number: int, need: Need) -> None:
    """Note what is needed of an equation's operands."""
    positions, (dim, _) = plan.positions, need
    variable = eqn.outvars[number]
    if need == WHOLE:
        _need_whole(plan, eqn.invars)
        return
    rule, depends = positions.rule(eqn, number, dim), positions.depends(variable)
    if depends and rule is None:
        raise NotIncremental.by(eqn)
    if depends and rule and rule.whole and positions.lookahead(variable, dim) > 0:
        raise NotIncremental.by(eqn, LATER)
    if rule is None or rule.whole:
        _need_whole(plan, eqn.invars)
        plan.need(variable, WHOLE)
    elif not depends:
        # No row of it sees tokens, whatever it sums over.
        _need_rows(plan, eqn, rule, (dim, True) if rule.chunked else need)
    elif eqn.primitive.name == "scan":
        if not positions.carried(eqn):
            raise NotIncremental.by(eqn, "has a loop that begins with something of all positions")
        if eqn not in plan.carried:
            plan.carried.append(eqn)
        _need_rows(plan, eqn, rule, (0, True))
        plan.need(variable, (0, True))
    else:
        if rule.chunked:
            need = dim, True
            plan.need(variable, need)
        _check_pairs(plan, eqn, rule)
        _need_rows(plan, eqn, rule, need)


def _need_whole(plan: RowPlan, atoms: Sequence[Atom]) -> None:
    for atom in atoms:
        plan.need(atom, WHOLE)


def _need_rows(plan: RowPlan, eqn: Equation, rule: RowRule, need: Need) -> None:
    for atom, inner in zip(eqn.invars, rule.dims, strict=True):
        plan.need(atom, WHOLE if inner is None else (inner, need[1]))


def _check_pairs(plan: RowPlan, eqn: Equation, rule: RowRule) -> None:
    """Raise if an operation over positions would see later ones."""
    name, positions = eqn.primitive.name, plan.positions
    for atom, inner in zip(eqn.invars, rule.dims, strict=True):
        dims = positions.of(atom)
        if not dims:
            if positions.depends(atom):
                raise NotIncremental.by(positions.mixed_by(atom))
            continue
        mixed = len({positions.unit(atom, dim) for dim in dims}) > 1
        if len(dims) > 2 or (len(dims) == 2 and (mixed or name not in _OF_PAIRS)):
            raise NotIncremental.by(eqn, "reads pairs of positions")
        if inner is None and name not in _OF_PAIRS:
            raise NotIncremental.by(eqn)
        other = [d for d in dims if d != inner]
        if name in _VANISHING and other and other[0] in eqn.params["axes"]:
            assert inner is not None
            plan.look_back(eqn, atom, inner, other[0], _VANISHING[name])
    if name == "dot_general":
        _check_product(plan, eqn, rule)


def _check_product(plan: RowPlan, eqn: Equation, rule: RowRule) -> None:
    """Raise if a product sums over later positions."""
    side = rule.dims.index(None) ^ 1 if None in rule.dims else 0
    row, whole = eqn.invars[side], eqn.invars[side ^ 1]
    sums = eqn.params["dimension_numbers"][0]
    inner = rule.dims[side]
    assert inner is not None
    for mine, theirs in zip(sums[side], sums[side ^ 1], strict=True):
        if theirs in plan.positions.of(whole) or mine in plan.positions.of(row):
            plan.look_back(eqn, row, inner, mine, "zero")
