"""The matrix products of a JAX program, for tests of their precision."""

import math

import jax


def products(function, *arguments):
    """Every product in a function of these arguments: how many terms its sums have, and if it is in full precision.

    Half of a GPU's speed tempts to TF32, with which a sum of clipped vectors is longer than their clip norm.
    """
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                ((contracted, _), _), shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
                precision = equation.params["precision"]
                full = precision in (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)
                found.append((math.prod(shape[axis] for axis in contracted), full))
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found
