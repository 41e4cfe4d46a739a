"""A digest of a program: equal for two traces of the same function, in any process."""

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.jaxpr.equations import ClosedJaxpr, Jaxpr, Literal, aval_of


def fingerprint(closed: ClosedJaxpr) -> str:
    """Return a digest of a program's equations, literals and constants, without its names."""
    return hashlib.sha256(_closed(closed, {}).encode()).hexdigest()[:16]


def _closed(closed: ClosedJaxpr, known: dict[int, str]) -> str:
    constants = ",".join(_value(constant, known) for constant in closed.consts)
    return f"{_jaxpr(closed.jaxpr, known)}|{constants}"


def _jaxpr(jaxpr: Jaxpr, known: dict[int, str]) -> str:
    """Return the digest of a program, which may be called many times."""
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    numbers: dict[Any, int] = {}
    content = hashlib.sha256()

    def read(atom: Any) -> str:
        if isinstance(atom, Literal):
            return _value(atom.val, known)
        return f"%{numbers.setdefault(atom, len(numbers))}"

    def add(atoms: Any, text: str = "") -> None:
        kinds = (f"{read(atom)}:{_kind(aval_of(atom))}" for atom in atoms)
        content.update(f"{text}({','.join(kinds)})".encode())

    add([*jaxpr.constvars, *jaxpr.invars])
    for eqn in jaxpr.eqns:
        add(eqn.invars, eqn.primitive.name)
        add(eqn.outvars, _value(eqn.params, known))
    add(jaxpr.outvars)
    known[id(jaxpr)] = content.hexdigest()
    return known[id(jaxpr)]


def _kind(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', '')}{getattr(aval, 'shape', '')}"


def _value(value: Any, known: dict[int, str]) -> str:
    """Return a parameter as text; of what has an address or belongs to a mesh, the type alone."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.dtype):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, ClosedJaxpr):
        return _closed(value, known)
    if isinstance(value, Jaxpr):
        return _jaxpr(value, known)
    if isinstance(value, Mapping):
        pairs = sorted((str(key), each) for key, each in value.items())
        return f"{{{','.join(f'{key}={_value(each, known)}' for key, each in pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_value(each, known) for each in value)}]"
    return type(value).__name__


def _array(array: Any) -> str:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return f"{array.dtype}{array.shape}"
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    content = np.asarray(array)
    return f"{content.dtype}{content.shape}{hashlib.sha256(content.tobytes()).hexdigest()}"
