"""Loops through positions that pass their states on, from device to device."""

from typing import NamedTuple

from jax.sharding import PartitionSpec

from meshwright.program.dims.op import is_inexact
from meshwright.program.jaxpr.equations import Equation, Var, aval_of, scan_counts
from meshwright.program.kernels.regions import Substitution


class PassedStates(NamedTuple):
    """A loop through positions, and the layouts of its states; the rest as in attention."""

    module: str
    sent: tuple[tuple[str, float, bool], ...]
    times: int
    states: tuple[PartitionSpec, ...]

    @property
    def use(self) -> Substitution:
        """How it is evaluated, in words."""
        how = "each device goes through its own positions"
        how += ", after exchanging their states" if self.states else ""
        return Substitution("scan", self.module, how)


def scales_and_adds(eqn: Equation) -> bool:
    """Whether a loop only scales the entries of its state and adds to them."""
    jaxpr, (consts, carries) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
    states = jaxpr.invars[consts : consts + carries]
    # Which state a value is made of; -1 if it is made in another way.
    made = {v: n for n, v in enumerate(states) if is_inexact(aval_of(v))}
    for inner in jaxpr.eqns:
        read = [made.get(atom) if isinstance(atom, Var) else None for atom in inner.invars]
        of = {n for n in read if n is not None}
        if not of:
            continue
        name = inner.primitive.name
        scales = (name == "mul" and None in read) or (name == "div" and read[1] is None)
        same = len(of) == 1 and (scales or name in ("add", "sub", "neg", "convert_element_type"))
        same = same and is_inexact(aval_of(inner.outvars[0]))
        made.update(dict.fromkeys(inner.outvars, of.pop() if same else -1))
    after = [made.get(v) if isinstance(v, Var) else None for v in jaxpr.outvars[:carries]]
    return after == list(range(carries))
