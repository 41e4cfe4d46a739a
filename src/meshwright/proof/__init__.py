"""The equivalence certificate: the same run on one device and on the mesh, compared."""

from meshwright.proof.certificate import Certificate, Comparison
from meshwright.proof.run import verify

__all__ = ["Certificate", "Comparison", "verify"]
