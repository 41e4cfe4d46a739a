"""The equivalence certificate: the same training on one device and on the mesh, compared."""

import sys
import types
from typing import Any

from meshwright.verify.certificate import Certificate, Comparison
from meshwright.verify.run import verify

__all__ = ["Certificate", "Comparison", "verify"]


class _CallableModule(types.ModuleType):
    """Lets ``mw.verify(...)`` be the call although ``meshwright.verify`` is also this package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Certificate:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
