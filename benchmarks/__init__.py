"""Measurements that back the claims of the documentation; not part of the package."""
