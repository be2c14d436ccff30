"""The numpy oracle: every part of the engine as a short program that is easy to check by eye.

Modules carry the names of their C++ counterparts. They import numpy alone and share no code with the engine,
so that a mistake has to be made twice, in two styles, to go unnoticed. docs/numerics.md is the common
definition.
"""
