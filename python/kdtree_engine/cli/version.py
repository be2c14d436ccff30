"""The version of this package, installed or run from its sources."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """The installed distribution's version; in a build by hand, that of the native module."""
    try:
        return metadata.version("kdtree-engine")
    except metadata.PackageNotFoundError:
        from kdtree_engine import _native

        return str(_native.build_info()["version"])
