"""The reference backend: every op by its own reference implementation, in torch. The specification of all others."""

from motley.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
