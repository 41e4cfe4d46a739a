"""The equivalence certificate: the same training on one device and on the mesh, compared."""

from meshwright.verify.certificate import Certificate, Comparison
from meshwright.verify.run import verify

__all__ = ["Certificate", "Comparison", "verify"]
